"""A server that is lost ends the epoch with an error, in place of a wait without end, and never in silence."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline

ROWS = np.arange(50_000)
LOST = "Expected the {} of the tf.data service at .*{}.*Found: {}.*What to do"


@pytest.fixture
def cluster(servers):
    """A dispatcher and two workers, each a process: number and address."""
    dispatcher, (at,) = servers.serve("--port", "0", "--workers", "0")
    workers = [servers.serve("--dispatcher", at) for _ in range(2)]
    yield (dispatcher, at), [(number, addresses[1]) for number, addresses in workers]
    for number in {dispatcher, *(number for number, _ in workers)} & set(servers.started):
        os.kill(number, signal.SIGKILL)


def batches_of(at):
    """An iterator that has begun, and has long to go."""
    batches = iter(build_pipeline(ROWS, batch_size=10, shuffle=False, prefetch=0, service=f"grpc://{at}"))
    next(batches)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(("number", "found"), [(signal.SIGKILL, "nobody there"), (signal.SIGSTOP, r"no answer in 3 s")])
@pytest.mark.parametrize("kind", ["worker", "dispatcher"])
def test_a_server_that_is_killed_or_stopped_is_an_error(cluster, soon, kind, number, found):
    dispatcher, workers = cluster
    process, at = dispatcher if kind == "dispatcher" else workers[0]
    batches = batches_of(dispatcher[1])
    os.kill(process, number)
    with pytest.raises(tf.errors.DataLossError, match=LOST.format(kind, at, found)):
        list(batches)


@pytest.mark.slow
def test_a_worker_that_is_started_again_at_once_is_an_error(servers, cluster, soon):
    (_, dispatcher), ((process, at), _) = cluster
    batches = batches_of(dispatcher)
    os.kill(process, signal.SIGKILL)
    servers.wait(process)
    servers.serve("--dispatcher", dispatcher, "--worker-port", at.split(":")[1])
    with pytest.raises(
        tf.errors.DataLossError, match=LOST.format("worker", at, "another process than before|the conn")
    ):
        list(batches)


def test_a_service_that_is_not_there_is_an_error_of_the_plan(soon):
    with pytest.raises(PipelineError, match=r"service at 127\.0\.0\.1:9\. Found: nobody there.*start it"):
        plan_pipeline(ROWS, service="grpc://127.0.0.1:9")


@pytest.mark.slow
def test_a_dispatcher_without_workers_is_an_error(servers, soon):
    _, (at,) = servers.serve("--port", "0", "--workers", "0")
    assert "no worker there yet" in unwrapped(plan_pipeline(ROWS, service=f"grpc://{at}"))
    with pytest.raises(tf.errors.DataLossError, match=LOST.format("dispatcher", at, "it has had no worker for 3 s")):
        list(build_pipeline(ROWS, service=f"grpc://{at}"))


@pytest.mark.slow
def test_fit_ends_with_the_error_and_goes_on_once_the_worker_is_back(servers, soon):
    process, (at, _) = servers.serve("--port", "0", "--workers", "1")
    second, (_, lost) = servers.serve("--dispatcher", at)
    pairs = np.zeros((100_000, 1), "float32"), np.zeros((100_000, 1), "float32")
    dataset = build_pipeline(pairs, batch_size=10, shuffle=False, service=f"grpc://{at}")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    kill = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 3 and os.kill(second, signal.SIGKILL)
    )
    with pytest.raises(tf.errors.DataLossError, match=r"Expected the worker of the tf\.data service"):
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[kill])
    servers.wait(second)
    with pytest.raises(tf.errors.DataLossError, match=LOST.format("worker", lost, "nobody there")):
        next(iter(dataset))
    servers.serve("--dispatcher", at, "--worker-port", lost.split(":")[1])
    model.fit(dataset.take(20), shuffle=False, verbose=0)
    os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_between_epochs_servers_may_come_and_be_started_again(servers, soon, tmp_path):
    folder = ("--workers", "0", "--data-folder", str(tmp_path / "state"))
    dispatcher, (at,) = servers.serve("--port", "0", *folder)
    worker, (_, own) = servers.serve("--dispatcher", at)
    rows = np.arange(1000)
    dataset = build_pipeline(rows, batch_size=10, service=f"grpc://{at}")

    def epoch():
        return np.sort(np.concatenate(list(dataset))).tolist()

    assert epoch() == rows.tolist()
    servers.serve("--dispatcher", at)
    assert epoch() == rows.tolist()
    for process, arguments in (
        (dispatcher, ("--port", at.split(":")[1], *folder)),
        (worker, ("--dispatcher", at, "--worker-port", own.split(":")[1])),
    ):
        os.kill(process, signal.SIGTERM)
        servers.wait(process)
        servers.serve(*arguments)
        assert epoch() == rows.tolist()
