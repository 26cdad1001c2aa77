"""In a Python of its own, which a SIGTERM may end."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TAKE_SIGTERM = """
import ctypes, os, signal, time
from tfopt.distribute.sigterm import restore_sigterm
{before}
ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # as a runtime in C does: here it ignores the signal
{restore}
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
print("alive")
"""


@pytest.mark.parametrize(
    ("before", "restore", "code"),
    [
        ("", "", 0),
        ("", "restore_sigterm()", -15),
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(9))", "restore_sigterm()", 9),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "restore_sigterm()", 0),
    ],
)
def test_sigterm_reaches_python(before, restore, code):
    command = [sys.executable, "-c", TAKE_SIGTERM.format(before=before, restore=restore)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == code
