import json
import logging
import threading
from pathlib import Path

import pytest

from tfopt.callbacks.shared.workers import WorkerRank, WorkerSummaries, merge

TASKS = ("worker0", "worker1", "worker2")
CHIEF = WorkerRank("worker0", True, TASKS)


def put(folder, place, epoch, figures, *, gpus=1):
    summaries = WorkerSummaries(folder, WorkerRank(TASKS[place], place == 0, TASKS))
    summaries.put(epoch, figures, gpus=gpus)
    summaries.close()


def merged(folder):
    return json.loads((folder / "utilization-summary.json").read_text())


def test_the_chief_merges_all(tmp_path):
    for place in (2, 1, 0):
        figures = {
            "gpu_energy_joules": 100.0 * place,
            "gpu_memory_peak_mib": 5.0 + place,
            "gpu_power_watts": 10 * place,
        }
        put(tmp_path, place, 4, figures, gpus=8)
    found = merged(tmp_path)
    assert (found["epoch"], found["gpus"], found["missing"], found["stale"]) == (4, 24, [], [])
    assert (found["gpu_energy_joules"], found["gpu_memory_peak_mib"]) == (300.0, 7.0)
    assert found["overall"]["gpu_power_watts"] == {"mean": 10.0, "min": 0, "max": 20}
    assert [found["workers"][task]["figures"]["gpu_power_watts"] for task in TASKS] == [0, 10, 20]
    assert found["workers"]["worker1"]["time_seconds"] > 1e9


def test_who_is_missing_or_far_behind_is_named_and_sums_are_unknown(tmp_path):
    put(tmp_path, 1, 2, {"gpu_energy_joules": 999.0, "gpu_power_watts": 999.0})
    put(tmp_path, 0, 4, {"gpu_energy_joules": 1.0, "gpu_power_watts": 300.0})
    found = merged(tmp_path)
    assert (found["missing"], found["stale"]) == (["worker2"], ["worker1"])
    assert (found["gpu_energy_joules"], found["gpus"]) == (None, None)
    assert found["overall"]["gpu_power_watts"] == {"mean": 300.0, "min": 300.0, "max": 300.0}
    assert found["workers"]["worker1"]["epoch"] == 2


def test_a_disk_that_hangs_holds_nothing_up(tmp_path, monkeypatch):
    """An earlier run's summary is removed, but not by the thread that begins the training."""
    put(tmp_path, 1, 7, {"gpu_power_watts": 100.0})
    trainings, unlink = threading.current_thread(), Path.unlink

    def checked(path, **options):
        assert threading.current_thread() is not trainings
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", checked)
        WorkerSummaries(tmp_path, WorkerRank("worker1", False, TASKS)).close()
    assert not list(tmp_path.glob("utilization-summary-worker1*"))


def test_one_epoch_behind_is_in_time(tmp_path):
    put(tmp_path, 1, 3, {"gpu_power_watts": 100.0})
    put(tmp_path, 0, 4, {"gpu_power_watts": 300.0})
    assert merged(tmp_path)["overall"]["gpu_power_watts"]["mean"] == 200.0


def test_the_end_of_fit_takes_what_came_after_the_chiefs_last_epoch(tmp_path):
    chief = WorkerSummaries(tmp_path, CHIEF)
    chief.put(0, {"gpu_power_watts": 300.0}, gpus=1)
    put(tmp_path, 1, 0, {"gpu_power_watts": 100.0})
    chief.close()
    chief.close()
    assert merged(tmp_path)["overall"]["gpu_power_watts"]["mean"] == 200.0


def test_a_worker_writes_only_its_own(tmp_path):
    put(tmp_path, 1, 0, {"gpu_power_watts": 100.0})
    assert [path.name for path in tmp_path.iterdir()] == ["utilization-summary-worker1.json"]


def test_a_new_run_forgets_its_old_summary(tmp_path):
    put(tmp_path, 1, 9, {"gpu_power_watts": 999.0})
    WorkerSummaries(tmp_path, WorkerRank("worker1", False, TASKS)).close()
    put(tmp_path, 0, 0, {})
    assert merged(tmp_path)["missing"] == ["worker1", "worker2"]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"epoch": "x", "gpus": 1, "figures": {}}', '{"epoch": 0, "gpus": 1, "figures": 7}'],
)
def test_a_damaged_summary_counts_as_missing(tmp_path, text):
    (tmp_path / "utilization-summary-worker1.json").write_text(text)
    assert merge(tmp_path, CHIEF, epoch=0)["missing"] == list(TASKS)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "tfopt"):
        put(tmp_path / "file", 0, 0, {})
    assert "Expected the utilization summary to work" in caplog.text
