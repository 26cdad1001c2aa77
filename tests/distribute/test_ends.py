"""Real trainings whose workers take different steps, whose input fails, or of which one waits for ever: all end."""

import pytest
import tensorflow as tf
from quick import campaign, first_quick
from watched_workers import ROOT, Workers, free_addresses

TRAINING = ROOT / "tests" / "support" / "distributed_ends.py"
SAME_WAY = "a restart would end in the same way."


class Trainings(Workers):
    """Runs the script in two workers."""

    def run_case(self, case, folder="", **seconds):
        """Returns how both ended. `seconds` change the watchdog's intervals."""
        addresses = free_addresses(2)
        for index in range(2):
            self.start_training(addresses, index, TRAINING, case, folder, **seconds)
        return self.wait(seconds=180)


@pytest.fixture
def trainings():
    with Trainings() as trainings:
        yield trainings


@pytest.mark.parametrize(
    ("case", "own"),
    first_quick([("one-epoch-fewer", "the end of epoch 2")], 0)
    + campaign([("chief-evaluates-at-the-end", "the end of fit")]),
)
def test_a_peer_that_ended_early_is_no_reason_to_restart(trainings, case, own):
    ended = trainings.run_case(case)
    assert (ended[0].code, ended[1].code) == (1, 0), ended
    assert "Expected worker 1 (" in ended[0].stderr
    assert "Found: it had ended before, by itself and had come to the end of fit." in ended[0].stderr
    assert f"{SAME_WAY} This worker had come to {own}. This process ends with exit code 1." in ended[0].stderr


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("case", "text", "places"),
    [
        ("chief-evaluates-between", "collective instance ", {"the start of evaluate", "the end of fit"}),
        ("another-model", "shape mismatch in the collective instance ", set()),
    ],
)
def test_different_collective_operations_are_no_reason_to_restart(trainings, case, text, places):
    ended = trainings.run_case(case)
    assert [end.code for end in ended.values()] == [1, 1], ended
    for end in ended.values():
        assert text in end.stderr.rpartition("Expected ")[2].lower(), ended
        assert SAME_WAY in end.stderr
    said = "".join(end.stderr.rpartition("Expected ")[2] for end in ended.values())
    assert all(f"This worker had come to {place}." in said for place in places), ended


def write_files(folder, count, damaged_in=None):
    """Writes files of 32 records; in one of them, a byte of the 21st is wrong."""
    for number in range(count):
        path = folder / f"{number}.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for _ in range(32):
                writer.write(bytes(12))
        if number == damaged_in:
            contents = bytearray(path.read_bytes())
            contents[len(contents) * 20 // 32 + 15] ^= 1
            path.write_bytes(contents)


@pytest.mark.parametrize(
    ("case", "found"),
    first_quick([("files-for-one", "files: 1, workers: 2")], 0)
    + campaign([("no-files", "data that are not read from files")]),
)
def test_data_that_cannot_be_sharded_by_file_are_refused_in_all_workers(trainings, tmp_path, case, found):
    write_files(tmp_path, 1)
    ended = trainings.run_case(case, tmp_path)
    assert [end.code for end in ended.values()] == [1, 1], ended
    expected = "PipelineError: Expected a file for each worker, under AutoShardPolicy.FILE."
    for end in ended.values():
        assert f"{expected} Found: {found}. What to do: use AutoShardPolicy.DATA" in end.stderr, ended


@pytest.mark.campaign
def test_a_damaged_record_in_the_part_of_one_worker_ends_both_and_is_no_reason_to_restart(trainings, tmp_path):
    write_files(tmp_path, 2, damaged_in=1)  # TensorFlow gives each worker a file
    ended = trainings.run_case("a-damaged-record", tmp_path)
    assert [end.code for end in ended.values()] == [1, 1], ended
    says = "PipelineError: Expected data that can be read to the end of the epoch. Found: DataLossError: corrupted reco"
    assert says in ended[1].stderr
    assert f"Found: it failed at epoch 1, step 5: {says}" in ended[0].stderr.rpartition("Expected worker 1 (")[2]
    assert "a restart would end in the same way. This worker had come to epoch 1, step " in ended[0].stderr


@pytest.mark.parametrize(
    ("case", "failed", "code", "says"),
    first_quick(
        [
            ("no-first-plan", 1, 1, "PipelineError: Expected one common length."),
            ("no-first-batch", 1, 1, "PipelineError: Expected every example to pass"),
            ("not-saved", 0, 75, "CheckpointError: Expected to save step "),
        ],
        0,
    ),
)
def test_what_fails_in_one_worker_alone_ends_the_other(trainings, tmp_path, case, failed, code, says):
    ended = trainings.run_case(case, tmp_path)
    assert (ended[failed].code, ended[1 - failed].code) == (1, code), ended
    assert says in ended[failed].stderr
    assert says in ended[1 - failed].stderr.rpartition(f"Expected worker {failed} (")[2]
    assert "retracing" not in ended[1 - failed].stderr


@pytest.mark.parametrize(
    ("case", "place", "line"),
    first_quick([("each-waits-elsewhere", "since the end of fit", "<lambda>")], 0)
    + campaign([("one-waits", "since the end of epoch 1", "wait_in_python")]),
)
def test_a_worker_whose_python_waits_ends_all_at_the_deadline(trainings, case, place, line):
    ended = trainings.run_case(case, PROGRESS=20)
    assert [end.code for end in ended.values()] == [75, 75], ended
    found = ended[0].stderr.rpartition("Expected worker 1 (")[2]
    assert "Found: it has made no progress for 2" in found, ended
    assert f", {place}, and waits in {line} ({TRAINING}:" in found


@pytest.mark.slow
def test_a_worker_whose_python_waits_ends_though_the_chief_has_ended(trainings):
    ended = trainings.run_case("one-waits-at-the-end", PROGRESS=20)
    assert (ended[0].code, ended[1].code) == (0, 75), ended
    assert "s, since the end of epoch 2, and waits in wait_in_python (" in ended[1].stderr
