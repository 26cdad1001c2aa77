"""A real Ray on this machine runs the template with two workers, one of which is killed during training."""

import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfopt.distribute.ray import _in_worker, trainer
from tfopt.distribute.watchdog.watch import Watch
from tfopt.errors import UnsupportedError

ROOT = Path(__file__).parents[2]
DEADLINE = 400  # seconds; only keeps a failing test from hanging

# The template, except that each worker reports its start and the second is killed in epoch 2.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import ray, ray.train

import training
from tfopt.distribute.ray import load

FOLDER = Path(sys.argv[1])
whole = training.train

def train(config):
    import tensorflow as tf
    from tfopt import pipelines

    rank, checkpoint = ray.train.get_context().get_world_rank(), ray.train.get_checkpoint()
    report, reported = ray.train.report, []

    def report_and_die(metrics, checkpoint=None):
        report(metrics, checkpoint=checkpoint)
        reported.append(metrics)
        if rank == 1 and not resumed and len(reported) == 2:
            # Ray's controller polls: on a fast machine it would not know a checkpoint yet, and begin from the start.
            known, due = FOLDER / "runs" / training.NAME / "checkpoint_manager_snapshot.json", time.monotonic() + 60
            while time.monotonic() < due and not (known.exists() and '"checkpoint_2' in known.read_text()):
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    def build_and_read(*args, **options):
        dataset, strategy = build(*args, **options), tf.distribute.get_strategy()
        for x, y in dataset:
            seen.extend(part[0] for half in strategy.experimental_local_results(x) for part in half.numpy().tolist())
        return dataset

    resumed = checkpoint.get_metadata()["epochs"] if checkpoint else 0
    build, seen = pipelines.build_pipeline, []
    pipelines.build_pipeline, ray.train.report = build_and_read, report_and_die
    whole(config)
    found = {"rank": rank, "resumed": resumed, "reported": reported, "keras": tf.keras.__version__}
    found |= {"assigned": os.environ["TFOPT_GPUS_ASSIGNED"], "seen": seen}
    (FOLDER / f"worker{rank}.json").write_text(json.dumps(found))

training.train, training.STORAGE = train, str(FOLDER / "runs")
ray.init(num_cpus=2, include_dashboard=False)
training.main()
ray.shutdown()

def state(model):
    return [variable.numpy().tolist() for variable in model.weights + model.optimizer.variables]

last = sorted(path for path in (FOLDER / "runs" / training.NAME).glob("checkpoint_*") if path.is_dir())[-1]
trained, alone = training.make_model(), training.make_model()
load(trained, ray.train.Checkpoint.from_directory(last))
x, y = training.data()
history = alone.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0).history
compared = {"trained": state(trained), "alone": state(alone), "loss": history["loss"], "last": str(last)}
compared["examples"] = x[:, 0].tolist()
(FOLDER / "compared.json").write_text(json.dumps(compared))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder that the run left, and what it printed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'ray[train]'")
    folder = tmp_path_factory.mktemp("ray")
    shutil.copy(ROOT / "tfopt" / "distribute" / "templates" / "ray.py", folder / "training.py")
    (folder / "driver.py").write_text(SCRIPT)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    process = subprocess.Popen(
        [sys.executable, "driver.py", folder],
        cwd=folder,
        env=environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "TFOPT_GPUS_ASSIGNED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out
    return folder, out


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.mark.slow
class TestTheTemplate:
    def test_resumes_from_the_checkpoint_after_a_worker_was_killed(self, run):
        workers = [read(run[0], f"worker{rank}.json") for rank in range(2)]
        assert [worker["rank"] for worker in workers] == [0, 1]
        assert workers[0]["resumed"] == workers[1]["resumed"]
        assert workers[0]["resumed"] in (1, 2)  # Ray may have missed the checkpoint after which the worker was killed
        assert all(len(worker["reported"]) == 5 - worker["resumed"] for worker in workers)

    def test_each_example_is_seen_by_one_worker(self, run):
        seen = [read(run[0], f"worker{rank}.json")["seen"] for rank in range(2)]
        assert len(seen[0]) == len(seen[1])
        assert sorted(seen[0] + seen[1]) == sorted(read(run[0], "compared.json")["examples"])

    def test_trains_what_one_process_trains(self, run):
        compared = read(run[0], "compared.json")
        assert len(compared["trained"]) == len(compared["alone"]) > 4
        for trained, alone in zip(compared["trained"], compared["alone"], strict=True):
            assert flat(trained) == pytest.approx(flat(alone), rel=1e-3, abs=1e-5)

    def test_reports_metrics_and_a_checkpoint(self, run):
        folder, out = run
        compared = read(folder, "compared.json")
        losses = [metrics["loss"] for metrics in read(folder, "worker0.json")["reported"]]
        assert losses == pytest.approx(compared["loss"][-len(losses) :], rel=1e-4)
        assert f"path={compared['last']})\n" in out

    def test_is_keras_3_on_gpus_of_each_workers_own(self, run):
        worker = read(run[0], "worker0.json")
        assert worker["keras"].startswith("3.")
        assert worker["assigned"] == "1"


def flat(values):
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


class TestTheEndOfAWorker:
    """Ray kills its workers when all have ended; without a goodbye, the last ones would report a loss."""

    @pytest.fixture
    def byes(self, monkeypatch):
        said = []
        monkeypatch.setattr(Watch, "_running", SimpleNamespace(_say_bye=lambda: said.append("bye")))
        return said

    def test_is_told_to_the_others(self, byes):
        def train(config):
            assert byes == []
            return config

        run = _in_worker(train)
        assert list(inspect.signature(run).parameters) == ["config"]  # Ray inspects it
        assert (run({"epochs": 5}), byes) == ({"epochs": 5}, ["bye"])

    def test_is_left_to_ray_if_it_failed(self, byes):
        with pytest.raises(ZeroDivisionError):
            _in_worker(lambda: 1 / 0)()
        assert byes == []


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.tensorflow", None)
    with pytest.raises(UnsupportedError, match=r"Expected Ray.* Run: pip install 'tfopt\[ray\]'"):
        trainer(print)


@pytest.mark.slow
def test_a_range_of_workers_is_refused():
    train = pytest.importorskip("ray.train")
    with pytest.raises(UnsupportedError, match=r"Expected a fixed number of workers. Found: .*num_workers=\(2, 4\)"):
        trainer(print, scaling_config=train.ScalingConfig(num_workers=(2, 4)))
