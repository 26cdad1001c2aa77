import os
import subprocess
import sys

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from versions import since_tensorflow

from tfopt.errors import UnsupportedError
from tfopt.xla import flags, xla_flags
from tfopt.xla.xla_flags import format_flags, parse

asks_xla = since_tensorflow("2.20")  # whose XLA says which flags it knows


@pytest.fixture
def early(monkeypatch):
    """As before TensorFlow starts its devices, with no flags set."""
    monkeypatch.setenv("XLA_FLAGS", "")  # or what is set in the test would outlast it
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(xla_flags, "devices_started", lambda: False)
    monkeypatch.setattr(xla_flags, "_set_in_time", None)


def run(script, **environ):
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=240)


COMPILE = "import tensorflow as tf; tf.function(lambda: tf.constant(1.0) + 1.0, jit_compile=True)()\n"


@pytest.mark.slow
def test_stock_tensorflow_ends_the_process_over_an_unknown_flag():
    ended = run(COMPILE, XLA_FLAGS="--xla_nonsense=1")
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "Unknown flag in XLA_FLAGS: --xla_nonsense=1" in ended.stderr


IN_TIME = """
import os
import tfopt
from tfopt.errors import UnsupportedError
from tfopt.hardware.gpu_memory import devices_started
import tensorflow as tf
import keras

keras.config.set_dtype_policy("mixed_bfloat16")
tf.config.list_physical_devices()
assert not devices_started()
print(tfopt.xla.flags(xla_dump_to=os.environ["FOLDER"]))
tf.constant(1.0)
assert devices_started()
print(tfopt.xla.flags(xla_dump_to=os.environ["FOLDER"]))
tf.function(lambda: tf.constant(1.0) + 1.0, jit_compile=True)()
try:
    tfopt.xla.flags(xla_dump_to="elsewhere")
except UnsupportedError as error:
    print(error)
"""


@asks_xla
@pytest.mark.slow
def test_xla_runs_with_the_flags_and_refuses_those_that_come_too_late(tmp_path):
    folder = tmp_path / 'a "folder"'
    ended = run(IN_TIME, FOLDER=str(folder))
    assert ended.returncode == 0, ended.stderr
    first, again, refused = ended.stdout.splitlines()
    assert first == again == f"xla_dump_to={folder}"
    assert any(folder.iterdir())  # XLA wrote its modules
    assert "Expected XLA flags before TensorFlow starts its devices. Found: they have started" in refused
    assert "start Python with XLA_FLAGS='--xla_dump_to=elsewhere'" in refused


@asks_xla
@pytest.mark.usefixtures("early")
def test_flags_are_merged_and_say_what_they_replaced(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2  --xla_cpu_enable_fast_math")
    done = flags(xla_gpu_autotune_level=3, xla_gpu_enable_cublaslt=True, xla_gpu_autotune_gemm_rtol=0.25)
    assert os.environ["XLA_FLAGS"] == (
        "--xla_gpu_autotune_level=3 --xla_cpu_enable_fast_math=true --xla_gpu_enable_cublaslt=true "
        "--xla_gpu_autotune_gemm_rtol=0.25"
    )
    assert done.replaced == {"xla_gpu_autotune_level": "2"}
    assert str(done).startswith("xla_gpu_autotune_level=3 (was 2), xla_cpu_enable_fast_math=true, ")
    assert flags(xla_gpu_enable_cublaslt=False).in_force["xla_gpu_enable_cublaslt"] == "false"
    assert flags().replaced == {}
    assert flags().to_dict()["in_force"]["xla_gpu_autotune_level"] == "3"


@asks_xla
@pytest.mark.usefixtures("early")
def test_processes_started_afterwards_inherit_them():
    assert str(flags()) == "defaults"
    flags(xla_gpu_autotune_level=0)
    assert run("import os; print(os.environ['XLA_FLAGS'])").stdout.strip() == "--xla_gpu_autotune_level=0"


@asks_xla
@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"xla_gpu_enable_cublastl": True}, ValueError, "Did you mean 'xla_gpu_enable_cublaslt'?"),
        ({"nonsense": 1}, ValueError, "Received: 'nonsense', which it does not know"),
        (
            {"xla_gpu_cudnn_gemm_fusion_level": 2.5},
            ValueError,
            "accepts for xla_gpu_cudnn_gemm_fusion_level. Received: '2",
        ),
        ({"xla_gpu_enable_cublaslt": "maybe"}, ValueError, "accepts for xla_gpu_enable_cublaslt. Received: 'maybe'"),
        ({"xla_gpu_experimental_autotune_cache_mode": "fast"}, ValueError, "Received: 'fast'"),
        ({"xla_dump_to": None}, TypeError, "Expected a bool, a number or a string for xla_dump_to. Received: None"),
        ({"xla_dump_to": ["a"]}, TypeError, "of type list"),
    ],
)
def test_what_xla_does_not_take_is_refused(values, error, message):
    with pytest.raises(error) as raised:
        flags(xla_gpu_autotune_level=2, **values)
    assert message in str(raised.value)
    assert "XLA_FLAGS" not in os.environ


@asks_xla
@pytest.mark.usefixtures("early")
@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("flags.txt", "Found 'flags.txt'"),
        ("--xla_dump_to=a b --xla_gpu_autotune_level=2", "Found 'b --xla_gpu_autotune_level=2'"),
        ("--xla_nonsense=1", "would end this process. Fix the environment variable"),
    ],
)
def test_what_stands_in_the_environment_must_be_flags(monkeypatch, before, message):
    monkeypatch.setenv("XLA_FLAGS", before)
    with pytest.raises(UnsupportedError) as raised:
        flags(xla_gpu_autotune_level=2)
    assert message in str(raised.value)
    assert os.environ["XLA_FLAGS"] == before


@asks_xla
def test_too_late_in_this_process(monkeypatch):
    monkeypatch.setattr(xla_flags, "devices_started", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    with pytest.raises(UnsupportedError, match="Found: they have started"):
        flags(xla_gpu_autotune_level=2)  # who set it, and whether in time, is not known
    assert flags().in_force == {"xla_gpu_autotune_level": "2"}


@pytest.mark.usefixtures("early")
def test_an_xla_that_cannot_be_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(tf.sysconfig, "get_lib", lambda: str(tmp_path))
    with pytest.raises(UnsupportedError, match="Expected libtensorflow_framework in"):
        flags(xla_gpu_autotune_level=2)
    (tmp_path / "libtensorflow_framework.so.2").write_bytes(b"no library")
    with pytest.raises(UnsupportedError, match="Expected to ask the installed XLA"):
        flags(xla_gpu_autotune_level=2)
    monkeypatch.setattr(xla_flags.sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(UnsupportedError, match="Expected to ask the installed XLA"):
        flags(xla_gpu_autotune_level=2)


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(r"xla_[a-z0-9_]{1,9}", fullmatch=True), st.text(max_size=9)))
def test_every_value_is_read_as_it_was_written(values):
    assert parse(format_flags(values)) == values


@asks_xla
@pytest.mark.parametrize("value", ["a b", 'a"b', "'a'", '"', "\\", 'a \\"b\\', "tab\there", "", "=", "--xla_b"])
def test_xla_reads_what_is_written_here(value):
    """The flag behind it is read as one, and is unknown."""
    assert "Unknown flag in XLA_FLAGS: --xla_nonsense=1" in xla_flags._refusal(
        {"xla_dump_to": value, "xla_nonsense": "1"}
    )


def test_a_null_character_is_refused(early):
    with pytest.raises(ValueError, match=r"without null characters for xla_dump_to\. Received.*Remove"):
        flags(xla_dump_to="a\0b")
