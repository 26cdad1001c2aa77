"""The order of epochs, and examples that are read, decoded and batched many at once: against NumPy."""

import numpy as np
import pytest
from iterations import stages_run
from quick import first_quick

from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.as_source import arrays
from tfopt.pipelines.shared.epochs import Draw, Epoch, Position
from tfopt.pipelines.shared.seeding import in_batches, permutation, sequence

COUNT = 50
KEY = Epoch.first(3).key("files")
ROWS = {
    "row": np.random.default_rng(0).random((COUNT, 3, 2)).astype("float32"),
    "number": (np.arange(COUNT), np.array([f"é{number}" for number in range(COUNT)])),
    "empty": np.zeros((COUNT, 2, 0), "int8"),
}


def numbers_of(batches):
    return [int(number) for batch in batches for number in np.ravel(batch)]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("size", [1, 7, 10, 50, 60])
@pytest.mark.parametrize("make", [sequence, lambda count: permutation(count, KEY)])
def test_numbers_come_in_the_batches_of_batch(make, size, full):
    for numbers in (make(COUNT), make(COUNT).prefetch(1)):  # the second one is batched number by number
        batches = in_batches(numbers, size, full=full)
        plain = make(COUNT).batch(size, drop_remainder=full)
        assert batches.element_spec == plain.element_spec
        assert len(batches) == len(plain)
        for _ in range(2):
            for ours, theirs in zip(batches, plain, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_draws_follow_from_the_seed_the_epoch_and_the_part_alone():
    def drawn(seed, epoch, part="files", mixed=None, own=None, lasts=False):
        return tuple(Draw(part, lasts, mixed, own).key(Position(seed, epoch)))

    keys = [drawn(3, 0), drawn(4, 0), drawn(3, 1), drawn(3, 0, "shuffle"), drawn(3, 0, mixed=0), drawn(3, 0, mixed=1)]
    keys += [drawn(2**40, 0), drawn(3, 0, own=7), drawn(3, 0, lasts=True)]
    assert len({*keys}) == len(keys)
    assert (drawn(3, 1), drawn(4, 0, own=7), drawn(3, 5, lasts=True)) == (keys[2], keys[-2], keys[-1])
    whole = numbers_of(permutation(COUNT, KEY))
    assert sorted(whole) == list(range(COUNT)) != whole
    assert numbers_of(permutation(COUNT, KEY, skipped=7)) == whole[7:]


CHUNKED = [
    {"shuffle": False},
    {"shuffle": False, "remainder": "drop"},
    {"seed": 3},
    {"seed": 3, "transform": lambda example: {**example, "row": -example["row"]}},
    {"seed": 3, "transform": lambda example: {**example, "row": -example["row"]}, "cache": "memory"},
    {"seed": 3, "transform": lambda example: {**example, "row": -example["row"]}, "cache": None},
    {"seed": 3, "augment": lambda example: example},
    {"training": False},
]


@pytest.mark.parametrize("options", CHUNKED)
@pytest.mark.parametrize("batch_size", first_quick([8, 10, 50]))
def test_rows_are_those_of_the_arrays(options, batch_size):
    """In whole batches, in chunks and one by one; the order is that in which the numbers come."""
    dataset = build_pipeline(ROWS, **{"remainder": "keep", "batch_size": batch_size} | options)
    sign = -1 if "transform" in options else 1
    orders = []
    for _ in range(3):
        order = []
        for batch in dataset:
            at = batch["number"][0].numpy()
            np.testing.assert_array_equal(batch["row"], sign * ROWS["row"][at])
            assert [name.decode() for name in batch["number"][1].numpy()] == list(ROWS["number"][1][at])
            assert batch["empty"].shape == (len(at), 2, 0)
            order += at.tolist()
        expected = COUNT - (COUNT % batch_size if options.get("remainder") == "drop" else 0)
        assert len(set(order)) == len(order) == expected
        orders.append(order)
    if "seed" in options:
        assert orders[0] != orders[1] != orders[2] != orders[0]
    else:
        assert orders == [sorted(orders[0])] * 3


@pytest.mark.parametrize("part", [(0, 1), (1, 3)])
@pytest.mark.parametrize("transform", [None, lambda row: row + 0])
def test_a_seed_gives_rows_one_order_whatever_the_memory(free_memory, part, transform):
    source = arrays(np.arange(COUNT)).part(*part)
    options = {"batch_size": 8, "seed": 3, "transform": transform, "remainder": "keep"}
    roomy = plan_pipeline(source, **options)
    free_memory(0.0)
    tight = plan_pipeline(source, **options)
    assert (roomy.to_dict()["cache"], tight.to_dict()["cache"]) == ("memory" if transform else None, None)
    first, second = roomy.build(), tight.build()
    for _ in range(4):
        order = numbers_of(first)
        assert order == numbers_of(second)
        assert sorted(order) == list(range(COUNT))[part[0] :: part[1]]


@pytest.mark.slow
def test_an_unseeded_run_that_finds_a_cache_on_disk_shuffles_at_once(tmp_path):
    options = {"batch_size": 5, "transform": lambda row: row + 0, "cache": str(tmp_path / "cache")}
    written = build_pipeline(np.arange(COUNT), **options)
    first = numbers_of(written)
    later = [numbers_of(build_pipeline(np.arange(COUNT), **options)) for _ in range(2)]
    assert first not in later
    assert later[0] != later[1]
    seeded = [numbers_of(build_pipeline(np.arange(COUNT), **options, seed=3)) for _ in range(2)]
    assert seeded[0] == seeded[1], "under a seed, a run that writes the cache and one that reads it must agree"


LARGE = np.zeros((16, 128, 128, 3), "uint8")


@pytest.mark.parametrize("options", [{}, {"cache": "memory"}, {"augment": lambda image: image[::-1]}])
def test_large_rows_are_batched_in_pinned_memory_on_their_way_to_a_device(options):
    """Only TensorFlow's map-and-batch allocates there."""
    to_device, on_host = (build_pipeline(LARGE, batch_size=4, device=device, **options) for device in ("CPU:0", None))
    assert to_device.element_spec == on_host.element_spec
    assert "MapAndBatch" in stages_run(build_pipeline(LARGE, batch_size=4, device="CPU:0", **options).host)
