import dataclasses

import numpy as np
import pytest

from tfopt.pipelines import plan_pipeline
from tfopt.pipelines.cache.choice import MIB
from tfopt.pipelines.stages import output
from tfopt.pipelines.stages.read_shuffle import fitting_buffer


def test_the_shuffle_buffer_holds_everything_that_fits():
    assert fitting_buffer(1024, MIB, shared=False) == (1024, "all elements: 1.0 GiB, within the 1,024 MiB for it")
    assert fitting_buffer(10**6, MIB, shared=True)[0] == 10**6
    buffer, reason = fitting_buffer(2000, MIB, shared=False)
    assert buffer == 1024
    assert "1,024 of 2,000 elements of 1.0 MiB each" in reason
    assert "not mixed" in reason


def test_the_shuffle_buffer_is_bounded_where_the_count_is_unknown():
    assert fitting_buffer(None, MIB, shared=True)[0] == 1024
    assert fitting_buffer(None, 1, shared=False)[0] == 1_000_000
    assert fitting_buffer(None, 10.0**12, shared=False)[0] == 1


@pytest.mark.parametrize(("cpus", "threads"), [(1.5, 2), (3.0, 3), (4.0, None), (8.0, None)])
def test_threads_follow_the_quota_where_it_is_less_than_the_cpus(monkeypatch, cpus, threads):
    fake = dataclasses.replace(output.host(), cpus=cpus, affinity=(0, 1, 2, 3))
    monkeypatch.setattr(output, "host", lambda: fake)
    plan = plan_pipeline(np.zeros(8), batch_size=4)
    assert plan.stage("memory").threads == threads
    options = plan.build().options()
    assert options.threading.private_threadpool_size == threads
    assert options.autotune.cpu_budget == threads
    assert ("as many as this container's CPUs" in str(plan)) is (threads is not None)
