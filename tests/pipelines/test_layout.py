import dataclasses
import re

import pytest
import tensorflow as tf

from tfopt.hardware import host
from tfopt.pipelines import layout
from tfopt.pipelines.layout import MIB, decide_cache, shuffle_buffer
from tfopt.pipelines.options import PipelineOptions


def decide(cache="auto", transform=tf.identity, **given):
    options = PipelineOptions(cache=cache, transform=transform)
    facts = {"count": 100, "infinite": False, "example_bytes": float(MIB), "resident": False, "doubt": ""}
    return decide_cache(options, **(facts | given))


@pytest.mark.parametrize(("free_mib", "cached"), [(400.0, True), (399.0, False)])
def test_auto_caches_what_fits_a_quarter_of_the_free_memory(free_memory, free_mib, cached):
    free_memory(free_mib)
    found, reason = decide()
    assert found is cached
    assert "100.0 MiB" in reason
    assert f"quarter of the {free_mib:,.0f} MiB" in reason


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cache": None}, "cache=None"),
        ({"count": None}, "unknown"),
        ({"infinite": True, "count": None}, "endless"),
        ({"doubt": "PyFunc calls Python"}, "^PyFunc calls Python$"),
        ({"resident": True, "transform": None}, "save nothing"),
    ],
)
def test_auto_does_not_cache(given, text):
    cached, reason = decide(**given)
    assert cached is False
    assert re.search(text, reason)


def test_auto_caches_what_a_transform_computes_from_memory():
    assert decide(resident=True)[0] is True


def test_auto_does_not_cache_where_the_free_memory_is_unknown(free_memory):
    free_memory(None)
    assert decide() == (False, "100.0 MiB; the free memory of this machine is unknown")


@pytest.mark.parametrize(
    "given", [{}, {"count": None}, {"doubt": "PyFunc calls Python"}, {"resident": True, "transform": None}]
)
def test_memory_caches_whatever_the_room(free_memory, given):
    free_memory(1.0)
    assert decide(cache="memory", **given)[0] is True


def test_memory_refuses_endless_data():
    with pytest.raises(ValueError, match="expects data that ends"):
        decide(cache="memory", infinite=True, count=None)


def test_the_free_memory_is_the_hosts():
    assert layout.host is not host  # the fixture's, in every other test
    assert "memory_available_mib" in {field.name for field in dataclasses.fields(host())}


def test_the_shuffle_buffer_holds_everything_that_fits():
    assert shuffle_buffer(1024, MIB, shared=False) == (1024, "all elements: 1.0 GiB, within the 1,024 MiB for it")
    assert shuffle_buffer(10**6, MIB, shared=True)[0] == 10**6
    buffer, reason = shuffle_buffer(2000, MIB, shared=False)
    assert buffer == 1024
    assert "1,024 of 2,000 elements of 1.0 MiB each" in reason
    assert "not mixed" in reason


def test_the_shuffle_buffer_is_bounded_where_the_count_is_unknown():
    assert shuffle_buffer(None, MIB, shared=True)[0] == 1024
    assert shuffle_buffer(None, 1, shared=False)[0] == 1_000_000
    assert shuffle_buffer(None, 10.0**12, shared=False)[0] == 1
