import dataclasses
import re
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfopt.hardware import host
from tfopt.pipelines import CentralCrop, RandomCrop, Source
from tfopt.pipelines.cache import choice as choice_module
from tfopt.pipelines.cache.choice import choose_cache
from tfopt.pipelines.inspection.facts import MIB, Facts
from tfopt.pipelines.inspection.sample import Sample
from tfopt.pipelines.shared.options import PipelineOptions

SAMPLE = Sample(
    digest="",
    decoded_spec="",
    example_spec="",
    names=("a",),
    shapes=(((2,),),),
    raw_bytes=100.0,
    decoded_bytes=float(MIB) / 4,
    example_bytes=float(MIB),
    decode_seconds=0.02 * host().cpus,
    transform_seconds=0.01 * host().cpus,
)


@pytest.fixture
def free_disk(monkeypatch):
    """Sets the free disk that the planner sees, in MiB."""
    return lambda mib: monkeypatch.setattr(choice_module, "free_bytes", lambda folder: mib * MIB)


@pytest.fixture(autouse=True)
def probe(monkeypatch):
    """Sets the seconds that reading and computing one take in the probe; at first reading takes none."""

    def give(read, computed):
        monkeypatch.setattr(choice_module, "_probe", lambda folder, examples, size: (read, computed))

    give(0.0, float("inf"))
    return give


def decide(cache="auto", transform=tf.identity, sample=None, **given):
    chosen = {name: given.pop(name) for name in ("crop", "cache_after", "seed", "cache_limit_gib") if name in given}
    source = Source(name="some", dataset=lambda: None, resident=given.pop("resident", False))
    facts = {"count": 100, "used": 100, "steps": None, "infinite": False, "in_source": [], "doubt": ""} | given
    measured = dataclasses.replace(SAMPLE, **(sample or {}))
    facts |= {"sample": measured, "check": None, "raw_examples": transform is None}
    facts |= {"by_batch": False, "pinned": False}
    traced = SimpleNamespace(decoded=None, examples=None)  # which only the probe reads
    known = Facts(source=source, part=None, traced=traced, last_batch=("keep", ""), mixed=True, **facts)
    return choose_cache(PipelineOptions(cache=cache, transform=transform, **chosen), known, None)


@pytest.mark.parametrize(("free_mib", "on"), [(400.0, "memory"), (399.0, None)])
def test_auto_caches_what_fits_a_quarter_of_the_free_memory(free_memory, free_disk, free_mib, on):
    free_memory(free_mib)
    free_disk(0)
    choice = decide(cache_after="transform")
    assert choice.on == on
    assert "100.0 MiB" in choice.reason
    assert f"quarter of the {free_mib:,.0f} MiB" in choice.reason


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cache": None}, "cache=None"),
        ({"count": None}, "unknown"),
        ({"infinite": True, "count": None}, "endless"),
        ({"doubt": "PyFunc calls Python"}, "^PyFunc calls Python$"),
        ({"resident": True, "transform": None}, "save nothing"),
        ({"resident": True, "crop": RandomCrop(8)}, "nothing is computed before the crop"),
    ],
)
def test_auto_does_not_cache(given, text):
    choice = decide(**given)
    assert choice.on is None
    assert re.search(text, choice.reason)


def test_auto_caches_what_a_transform_computes_from_memory():
    assert decide(resident=True).on == "memory"


def test_auto_does_not_cache_where_the_free_memory_is_unknown(free_memory, free_disk):
    free_memory(None)
    free_disk(0)
    choice = decide()
    assert choice.on is None
    assert choice.reason.startswith("100.0 MiB; the free memory of this machine is unknown")


@pytest.mark.parametrize(
    "given", [{}, {"count": None}, {"doubt": "PyFunc calls Python"}, {"resident": True, "transform": None}]
)
def test_memory_caches_whatever_the_room(free_memory, given):
    free_memory(1.0)
    assert decide(cache="memory", **given).on == "memory"


@pytest.mark.parametrize("cache", ["memory", "./folder"])
def test_endless_data_are_not_cached(cache):
    with pytest.raises(ValueError, match="expects data that ends"):
        decide(cache=cache, infinite=True, count=None)


def test_the_free_memory_is_the_hosts():
    assert choice_module.host is not host  # the fixture's, in every other test
    assert "memory_available_mib" in {field.name for field in dataclasses.fields(host())}


def test_auto_caches_behind_transform_and_else_before_it(free_memory):
    assert decide().after == "transform"
    free_memory(200.0)  # a quarter holds 25 MiB, what is decoded
    assert (decide().on, decide().after) == ("memory", "decode")
    # Where most of the work would be left, memory does not help.
    assert decide(sample={"decode_seconds": 0.001}, cache_limit_gib=1e-6).on is None
    assert decide(cache_after="decode", sample={"decode_seconds": 0.001}).after == "decode"


def test_auto_does_not_cache_the_smaller_part_of_the_work(free_disk):
    free_disk(0)
    choice = decide(crop=RandomCrop(8), sample={"decode_seconds": 0.01, "transform_seconds": 0.02})
    assert choice.on is None
    assert "less than half of the work" in choice.reason


def test_nothing_random_stands_before_the_cache():
    assert decide(crop=RandomCrop(8)).after == "decode"
    assert decide(crop=CentralCrop(8)).after == "transform"
    with pytest.raises(ValueError, match="would freeze the random crop"):
        decide(crop=RandomCrop(8), cache_after="transform")


def test_auto_goes_to_disk_where_memory_is_short_and_it_pays(free_memory, free_disk, tmp_path):
    free_memory(20.0)
    free_disk(50.0)  # half of it holds what is decoded, and no more
    choice = decide()
    assert choice.folder == tmp_path / "cache" / "tfopt" / "pipelines"
    assert choice.after == "decode"  # by its size: a quarter of the example's
    assert "quarter of the 20 MiB of free memory; from disk" in choice.reason
    free_disk(49.0)
    assert "on disk they exceed the 24.5 MiB" in decide().reason
    free_disk(1000.0)
    assert decide(cache_limit_gib=0.02).on is None
    assert decide(cache_limit_gib=0.03).folder is not None


def test_auto_does_not_go_to_disk_for_little_work(free_memory, free_disk):
    free_memory(20.0)
    free_disk(10_000.0)
    choice = decide(sample={"decode_seconds": 1e-5, "transform_seconds": 0.0})
    assert choice.on is None
    assert "on disk it would hardly pay" in choice.reason


def test_auto_goes_to_disk_only_where_the_probe_shows_a_clear_advantage(free_memory, free_disk, probe):
    free_memory(20.0)
    free_disk(10_000.0)
    cpus = host().cpus
    slow = {"decode_seconds": 1.0 * cpus, "transform_seconds": 0.0}
    for read, computed, on_disk in [
        (0.33, float("inf"), True),
        (0.34, float("inf"), False),  # of the planner's own measurement
        (0.01, 0.04 * cpus, True),
        (0.01, 0.025 * cpus, False),  # which is the larger for cheap examples
        (0.0, 1e-6, False),  # the disk is slower than the probe
    ]:
        probe(read, computed)
        choice = decide(sample=slow)
        assert (choice.folder is not None) is on_disk, (read, computed)
        assert ("as measured on sampled examples" if on_disk else "would hardly pay") in choice.reason


def test_auto_does_not_go_to_disk_where_the_probe_fails(free_memory, free_disk, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    free_memory(20.0)
    free_disk(10_000.0)
    monkeypatch.setattr(choice_module, "_probe", fail)
    choice = decide()
    assert choice.on is None
    assert "writing the sampled examples to" in choice.reason
    assert "Permission denied" in choice.reason


def test_auto_does_not_go_to_disk_under_a_seed(free_memory, free_disk):
    free_memory(20.0)
    free_disk(10_000.0)
    choice = decide(seed=1)
    assert choice.on is None
    assert "does not depend on memory" in choice.reason
    assert decide(seed=1, cache="./folder").folder is not None


def test_where_a_folder_caches_does_not_hang_on_times():
    slow, quick = {"decode_seconds": 1.0}, {"decode_seconds": 0.0}
    assert {decide(cache="./here", sample=sample).after for sample in (slow, quick)} == {"decode"}
    like_sized = {"decoded_bytes": float(MIB)}
    assert {decide(cache="./here", sample=sample | like_sized).after for sample in (slow, quick)} == {"transform"}
