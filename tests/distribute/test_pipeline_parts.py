"""`fit`, `evaluate` and `predict` on `build_pipeline` in several processes: each example once, and in order."""

import functools
import json

import h5py
import numpy as np
import part_sources
import pytest
from pipeline_parts import FEW, ROWS, SOME
from quick import in_shares
from trained_apart import ended, start

ALL, BATCH = list(range(203)), 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns what each of so many processes saw in a share of the work."""

    @functools.cache
    def trained(processes, share):
        folder = tmp_path_factory.mktemp("parts")
        part_sources.write_files(folder, (68, 104, 31))  # of unlike sizes
        with h5py.File(folder / "rows.h5", "w") as file:
            file["rows"] = np.array(ALL)
        (folder / "sources").mkdir()
        for name in part_sources.NAMES if processes == 2 else ():
            part_sources.source(folder / "sources", name)
        ended(start("pipeline_parts.py", folder, share, workers=processes))
        return folder

    def found(processes, share="few"):
        folder = trained(processes, share)
        return [json.loads((folder / f"{index}.json").read_text()) for index in range(processes)]

    return found


@pytest.fixture(
    params=[
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.campaign),
        pytest.param(4, marks=pytest.mark.campaign),
    ]
)
def trained(run, request):
    """What each of the processes saw."""
    return run(request.param)


@pytest.mark.parametrize("name", ["arrays", "records"])
def test_each_epoch_and_evaluation_see_each_example_once(trained, name):
    for epoch in range(2):
        assert sorted(number for each in trained for number in each[name]["epochs"][epoch]) == ALL
    assert sorted(number for each in trained for number in each[name]["evaluated"]) == ALL
    for each in trained:
        assert abs(len(each[name]["epochs"][0]) - len(ALL) / len(trained)) < 1  # and reads only its share
        assert each[name]["steps"] == 2 * 17


def test_a_mixture_is_seen_once_an_epoch_in_the_same_turns(trained):
    """Of 203 and 70 examples; in processes whose parts of them are smaller, some come twice to end both together."""
    whole = [*ALL, *range(len(ALL), len(ALL) + SOME)]
    for epoch in range(2):
        epochs = [each["mixed"]["epochs"][epoch] for each in trained]
        assert {number for each in epochs for number in each} == set(whole)
        assert len(whole) <= sum(map(len, epochs)) <= len(whole) + 3 * len(trained)
        assert len({tuple(number in ALL for number in each) for each in epochs}) == 1
    for each in trained:
        assert each["mixed"]["weights"] == trained[0]["mixed"]["weights"]
        assert each["mixed"]["epochs"][0] != each["mixed"]["epochs"][1]


def test_full_batches_leave_out_what_they_say(trained):
    for epoch in range(2):
        found = [number for each in trained for number in each["full batches"]["epochs"][epoch]]
        assert len(found) == len(set(found)) == 16 * BATCH
    for each in trained:
        assert each["full batches"]["steps"] == 2 * 16
        assert f"of {len(ALL)} examples, {BATCH // len(trained)} of each batch" in each["full batches"]["plan"]


@pytest.mark.parametrize("name", ["arrays", "records", "full batches"])
def test_processes_agree_and_predict_in_the_order_of_the_source(trained, name):
    kernel, bias = (np.array(weight, "float64") for weight in trained[0][name]["weights"])
    outputs = (np.array(ALL) / len(ALL) * kernel.ravel() + bias).tolist()
    for each in trained:
        assert each[name]["weights"] == trained[0][name]["weights"]
        assert each[name]["loss"] == trained[0][name]["loss"]
        assert each[name]["predictions"] == pytest.approx(outputs, rel=1e-4, abs=1e-5)
        squares = [(output - number) ** 2 for output, number in zip(outputs, ALL, strict=True)]
        assert each[name]["evaluation loss"] == pytest.approx(np.mean(squares), rel=1e-5)


@pytest.mark.parametrize("how", ["transformed", "transformed in order"])
@pytest.mark.parametrize("name", ["arrays", "hdf5", "generator"])
def test_a_process_transforms_its_own_examples_only(trained, how, name):
    calls = [each[how][name] for each in trained]
    assert sorted(number for each in calls for number in each) == ALL
    for each in calls:
        assert abs(len(each) - len(ALL) / len(trained)) <= (1 if how == "transformed" else BATCH // len(trained))


@pytest.mark.parametrize(("share", "remainder", "seed", "name"), in_shares(ROWS, lambda *row: row in FEW))
def test_each_kind_of_source_is_seen_once_an_epoch(run, share, remainder, seed, name):
    found = [each["rows"][f"{remainder}, {seed}, {name}"] for each in run(2, share)]
    epochs = [[sorted(part) for part in epoch] for epoch in zip(*found, strict=True)]
    count = part_sources.COUNT
    for parts in epochs:
        seen = sorted(number for part in parts for number in part)
        if remainder == "keep":
            assert seen == part_sources.ALL
            assert sorted(map(len, parts)) == [count // 2, count - count // 2]
        else:
            assert [len(part) for part in parts] == [count // BATCH * BATCH // 2] * 2
            assert len(set(seen)) == len(seen)
    assert found[0][0] != found[0][1]  # another order


def test_what_would_lose_examples_is_refused(trained):
    for each in trained:
        assert "same order in each of several processes" in each["shuffled"]
        assert "inside the scope of the strategy of its" in each["outside"]
