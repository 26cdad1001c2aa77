"""docs/checkpoints.md: its snippets run as they stand, and what it says of tfopt is so."""

import inspect
import re
import subprocess

import keras
import numpy as np
import pytest
from resumed_fits import Interrupt, X, Y
from snippets import ROOT, run_snippets

from tfopt import checkpoint
from tfopt.bench.cli import FAILED, main
from tfopt.callbacks import TrainingCheckpoint, training_checkpoint
from tfopt.checkpoint import callback_states, position, signals

PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())


def net(units=4):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def fit(folder, *callbacks, model=None, epochs=1, verbose=0, **options):
    saving = TrainingCheckpoint(folder, **options)
    return (model or net()).fit(X, Y, epochs=epochs, verbose=verbose, callbacks=[*callbacks, saving])


def test_callbacks_whose_state_is_saved_are_all_named():
    row = next(line for line in PAGE.splitlines() if line.startswith("| callbacks |"))
    named = {*re.findall("`(.*?)`", row)} - {"get_state", "set_state"}
    assert named == {each.__name__ for each in callback_states._ATTRIBUTES}


def test_numbers_are_those_of_the_code():
    defaults = {name: each.default for name, each in inspect.signature(TrainingCheckpoint).parameters.items()}
    assert f"`every_seconds={defaults['every_seconds']}` | after a step, if the last checkpoint is ten minutes" in PAGE
    assert f"`keep={defaults['keep']}` | how many of the newest stay (the default)" in PAGE
    assert f"up to {position._MOST_BYTES // 2**20} MiB for each checkpoint" in PROSE
    assert signals._SAME_SECONDS == 2
    assert "One within two seconds of the first does not count" in PROSE
    assert f"exits with code {training_checkpoint.RESTART}" in PROSE
    assert f"exits with code {FAILED} if anything is damaged" in PROSE


def test_links_lead_to_headings_and_files():
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in PAGE.splitlines()}
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, anchor = link.partition("#")
        assert link.startswith("https://") or (ROOT / "docs" / file).exists(), link
        assert file or anchor in headings, link


def test_messages_are_those_that_appear(tmp_path, capsys):
    for _ in range(2):
        fit(tmp_path, epochs=2, verbose=2)
    said = capsys.readouterr().out.splitlines()[-1].replace(str(tmp_path), "checkpoints")
    assert said.replace("step 4 ", "step 320 ") in PAGE.splitlines()
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "tfopt" / "checkpoint").rglob("*.py"))
    begins = re.findall(r"^\| `Expected (.*?)(?: …|`)", PAGE, re.MULTILINE)
    assert len(begins) == 6
    assert [begin for begin in begins if begin not in sources] == []


@pytest.mark.slow
def test_an_earlier_checkpoint_is_gone_back_to_by_deleting_newer_manifests(tmp_path, capsys):
    fit(tmp_path, epochs=3, every_epochs=1)
    newest = checkpoint.available(tmp_path)[0].step
    next(tmp_path.glob(f"*-step-{newest}.json")).unlink()
    fit(tmp_path, epochs=3, verbose=2)
    assert f"Resuming from step {2 * newest // 3} " in capsys.readouterr().out
    assert checkpoint.verify(tmp_path).passed


@pytest.mark.slow
def test_fits_with_a_folder_each_go_on_in_one_script(tmp_path, capsys):
    def script(folder, *callbacks):
        model = net()
        fit(folder / "first", model=model, verbose=2)
        model.compile("sgd", "mse")
        fit(folder / "second", *callbacks, model=model, epochs=2, verbose=2)
        return model.get_weights()

    whole = script(tmp_path / "whole")
    with pytest.raises(SystemExit, match="75"):
        script(tmp_path / "cut", Interrupt("step", 1, 0))
    capsys.readouterr()
    assert all(map(np.array_equal, whole, script(tmp_path / "cut")))
    said = capsys.readouterr().out
    assert "Training already complete: restored its final state, step 2 " in said
    assert "Resuming from step 3 " in said


@pytest.mark.slow
def test_earlystopping_ends_a_training_for_good(tmp_path, capsys):
    for epochs in (5, 9):
        stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e3)
        history = fit(tmp_path, stopping, epochs=epochs, verbose=2)
        assert history.epoch == [0, 1]
    assert "Training already complete" in capsys.readouterr().out


def test_the_shell_restarts_only_what_asks_for_it(tmp_path):
    (loop,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for last in (0, 1):
        runs = tmp_path / f"runs{last}"
        program = f"echo >> {runs}; [ $(wc -l < {runs}) -lt 3 ] && exit 75; exit {last}"
        subprocess.run(["bash", "-c", loop.replace("python train.py", f"( {program} )")], check=True, timeout=60)
        assert runs.read_text() == "\n" * 3


@pytest.mark.slow
def test_the_snippets_run(tmp_path, capsys):
    printed = run_snippets("checkpoints.md", tmp_path)
    assert "[0, 1, 2, 3, 4, 5]" in printed
    assert "skipped: model/" in printed.splitlines()[-1]
    assert (tmp_path / "model.weights.h5").exists()
    assert main(["checkpoint", "list", str(tmp_path / "checkpoints")]) == 0
    assert re.search(r"^step \d+, .* UTC, 0.0 MiB, loss \d\.\d+ \(best\)$", capsys.readouterr().out, re.MULTILINE)
