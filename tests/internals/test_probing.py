import io
import json
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import probed_patches
import pytest
from probed_patches import ALL, EQUAL, MEETING, NEEDED, SETTINGS

from tfopt import repairs
from tfopt.distribute.data_check.fits import DATA_CHECK
from tfopt.fit import overlapping
from tfopt.internals import probe, probing
from tfopt.internals.probe import NEEDLESS, UNFIT, Verdict
from tfopt.warn import forget_warnings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where verdicts are kept; none is known yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "_known", {})
    return tmp_path / "tfopt" / "probes"


@pytest.fixture
def asked(monkeypatch):
    """Counts what is probed, and answers that it is needed."""
    asked = []

    def ask(patches, answer):
        for patch in patches:
            asked.append(patch.name)
            answer(patch.name, Verdict(probe.NEEDED, "so it is"))

    monkeypatch.setattr(probing, "_ask", ask)
    return asked


def test_what_becomes_of_patches(folder, monkeypatch, capfd):
    monkeypatch.setattr(probing, "_SECONDS", 15)
    found = dict(zip([patch.name for patch in ALL], probing.verdicts(ALL), strict=True))
    assert {name: verdict.state for name, verdict in found.items()} == {
        "needed": probe.NEEDED,
        "needless": NEEDLESS,
        "useless": UNFIT,
        "harmful": UNFIT,
        "equal": probe.NEEDED,
        "failing": UNFIT,
        "hanging": UNFIT,
        "dying": UNFIT,
        "meeting": probe.NEEDED,
        "left": UNFIT,
        "losing": UNFIT,
        "shorter": UNFIT,
    }
    assert found["useless"].why == "Keras computes 3 with the patch and 1 without it; 2 is right"
    assert found["failing"].why == found["left"].why == "RuntimeError: broken on purpose"
    unanswered = {"hanging", "dying", "losing"}
    assert {found[name].why for name in unanswered} == {"its probe did not end (the next process tries again)"}
    said = [line for line in capfd.readouterr().err.splitlines() if "tfopt does not know all of" in line]
    assert [line.partition(" It tries ")[2] for line in said] == [
        f"{len(ALL)} of its patches there, about ten seconds each, and keeps the answers in {folder}."
    ]
    kept = {path.name.rpartition("-")[0] for path in folder.iterdir()}
    assert kept == found.keys() - unanswered  # which may have been the machine


def test_a_process_that_cannot_start_says_why(folder):
    lost = replace(NEEDED, probe=replace(NEEDED.probe, home="probed_patches:LOST"))
    (verdict,) = probing.verdicts([lost])
    assert verdict.state == UNFIT
    assert re.match(r"the process that tries it failed: AttributeError: .*LOST.* \(the next process tries", verdict.why)
    assert list(folder.iterdir()) == []  # asked again next time


def test_settings_and_folders_of_the_process_that_asks_change_nothing(folder, tmp_path, monkeypatch):
    """A smoke run's limits, another floatx, and a folder with a module of a standard one's name."""
    monkeypatch.setenv("KERAS_MAX_EPOCHS", "1")
    monkeypatch.setenv("TF_FUNCTION_JIT_COMPILE_DEFAULT", "1")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "keras.json").write_text('{"floatx": "float16"}')
    (tmp_path / "random.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    (verdict,) = probing.verdicts([SETTINGS])
    assert verdict.why == "stock Keras computes ['float32', None, 1], with the patch ['float32', None, 2]"


def test_files_of_a_probe_are_gone_afterwards(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    (tmp_path / "files").mkdir()
    probing.verdicts([NEEDED, MEETING])
    assert list((tmp_path / "files").iterdir()) == []


def test_a_function_of_the_users_own_is_not_probed_in_its_place(folder, monkeypatch):
    monkeypatch.setattr(probed_patches, "number", lambda: 1)  # which a new process does not have
    (verdict,) = probing.verdicts([NEEDED])
    assert (verdict.state, verdict.lasts) == (UNFIT, False)
    assert verdict.why.startswith("this process runs other code than a new one")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("stderr", [None, SimpleNamespace(write=lambda text: None)])
def test_without_a_terminal_that_says_so(stderr, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert probing.verdicts([NEEDED])[0].state == probe.NEEDED


def test_without_a_python_to_start(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    (verdict,) = probing.verdicts([NEEDED])
    assert verdict.state == UNFIT
    assert "/nonexistent/python" in verdict.why
    assert list(folder.iterdir()) == []


def test_a_verdict_is_kept_for_the_next_process(asked, monkeypatch):
    assert probing.kept(NEEDED) is None
    first = probing.verdicts([NEEDED])
    monkeypatch.setattr(probing, "_known", {})
    assert [probing.kept(NEEDED)] == probing.verdicts([NEEDED]) == first
    assert asked == ["needed"]
    probing.verdicts([NEEDED, EQUAL])
    assert asked == ["needed", "equal"]


def test_of_those_that_ask_at_once_one_probes(asked, monkeypatch):
    began, ask = threading.Event(), probing._ask

    def ask_slowly(patches, answer):
        began.set()
        time.sleep(0.5)
        ask(patches, answer)

    monkeypatch.setattr(probing, "_ask", ask_slowly)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(probing.verdicts, [NEEDED])
        began.wait()
        second = threads.submit(probing.verdicts, [NEEDED, EQUAL])
        assert first.result() == second.result()[:1]
    assert asked == ["needed", "equal"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": "needed"}', '{"state": "neeeded", "why": ""}'])
def test_a_damaged_file_is_asked_again(asked, folder, monkeypatch, content):
    (first,) = probing.verdicts([NEEDED])
    (path,) = folder.iterdir()
    path.write_text(content)
    monkeypatch.setattr(probing, "_known", {})
    assert probing.verdicts([NEEDED]) == [first]
    assert asked == ["needed"] * 2
    assert json.loads(path.read_text())["state"] == "needed"


def test_without_a_place_it_is_asked_in_each_process_with_a_warning(asked, folder, tmp_path, monkeypatch, caplog):
    forget_warnings()
    (tmp_path / "tfopt").touch()  # where a folder would have to be
    for _ in range(2):
        assert probing.verdicts([NEEDED])[0].state == probe.NEEDED
    assert asked == ["needed"]
    monkeypatch.setattr(probing, "_known", {})
    probing.verdicts([NEEDED])
    assert asked == ["needed"] * 2
    (record,) = caplog.records
    assert record.message.startswith(f"Expected a folder that can be written at {folder}, ")
    assert record.message.endswith("Until XDG_CACHE_HOME names one, each process tries it again.")


def test_the_progress_is_shown_in_a_terminal(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    probing.verdicts([NEEDED])
    assert re.search(r"It tries 1 of its patches there, .*\.\n\r1 of 1 tried\n$", terminal.getvalue())


@pytest.mark.parametrize("what", ["versions", "_fingerprint", "_code"])
def test_another_version_or_source_is_asked_again(asked, monkeypatch, what):
    probing.verdicts([NEEDED])
    monkeypatch.setattr(probe, what, lambda *_: "another")
    probing.verdicts([NEEDED])
    assert asked == ["needed"] * 2


@pytest.mark.slow
def test_every_patch_is_needed_and_works_in_the_installed_keras():
    every = (*repairs.REPAIRS.values(), overlapping.PATCH, DATA_CHECK)
    patches = [repair for repair in every if not repair.is_absent]
    verdicts = probing.verdicts(patches)
    found = {patch.name: (verdict.state, verdict.why) for patch, verdict in zip(patches, verdicts, strict=True)}
    assert {name: pair for name, pair in found.items() if pair[0] != probe.NEEDED} == {}


@pytest.mark.slow
def test_a_repair_that_meets_another_source_is_tried_and_installed(monkeypatch):
    repair = repairs.CLEAR_SESSION
    monkeypatch.setattr(repair, "broken", dict.fromkeys(repair.broken, frozenset({"other"})))
    assert repairs.status().states["clear_session"] == "unknown"
    assert repairs.install("clear_session").states["clear_session"] == "repaired"
    repairs.remove("clear_session")
    assert repairs.status().states["clear_session"] == "broken"


@pytest.mark.parametrize(
    ("state", "shown", "installed"),
    [(NEEDLESS, "mended", False), (UNFIT, "refused", None), (probe.NEEDED, "broken", True)],
)
def test_what_a_verdict_does(monkeypatch, state, shown, installed):
    repair = repairs.CLEAR_SESSION
    monkeypatch.setattr(repair, "broken", dict.fromkeys(repair.broken, frozenset({"other"})))
    monkeypatch.setattr(probing, "_ask", lambda patches, answer: answer(patches[0].name, Verdict(state, "seen")))
    if installed is None:
        with pytest.raises(Exception, match=r"clear_session.* has tried the patch on this version: seen\."):
            repair.install()
    else:
        repair.install()
        assert repair.installed is installed
        repair.remove()
    assert repairs.status().states["clear_session"] == shown


def test_every_file_of_tfopt_is_in_the_key():
    for file in ("tfopt/repairs/mixed_precision.py", "tfopt/model/state.py", "pipelines/plan.py"):
        assert (ROOT / file).resolve() in [found.resolve() for found in probe._files()]
