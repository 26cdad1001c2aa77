"""The stages of a pipeline that take whole batches: functions of batches, padding, the copy to the device."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from iterations import stages_run
from unwrapped import unwrapped

from tfopt.pipelines import build_pipeline, per_batch, plan_pipeline
from tfopt.pipelines.device import placing
from tfopt.pipelines.stages import batch_stages
from tfopt.warn import forget_warnings

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = X.sum(axis=1)


def names(plan):
    return [stage.name for stage in plan.stages]


def noisy(x, y, seed):
    return x + tf.random.stateless_uniform((), seed), y


def test_a_function_of_batches_gets_batches_and_another_seed_each_time():
    seen = []

    def keeping(x, y, seed):
        seen.append(x.shape)
        return tf.cast(seed, tf.float32)[None], y

    dataset = build_pipeline((X, Y), batch_size=5, augment=per_batch(keeping), remainder="drop")
    assert seen[-1] == (5, 4)
    seeds = [tuple(x.numpy()[0]) for _ in range(2) for x, _ in dataset]
    assert len(set(seeds)) == len(seeds) == 8


def test_a_random_function_of_batches_without_seed_is_refused_under_one():
    def plain(x, y):
        return x + tf.random.uniform(()), y

    build_pipeline((X, Y), batch_size=5, augment=per_batch(plain))
    with pytest.raises(ValueError, match="Expected an `augment` that draws from its keyword `seed`"):
        build_pipeline((X, Y), batch_size=5, augment=per_batch(plain), seed=1)


def weights_after(dataset, **compiled):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    model.fit(dataset, epochs=2, verbose=0, shuffle=False)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_padding_trains_as_a_smaller_last_batch(jit_compile):
    options = {"batch_size": 8, "shuffle": False}
    padded = build_pipeline((X, Y), remainder="pad", **options)
    assert [x.shape[0] for x, _, _ in padded] == [8, 8, 8]
    assert padded.element_spec[0].shape == (8, 4)
    assert len(padded) == 3
    kept = build_pipeline((X, Y), remainder="keep", **options)
    found, expected = (weights_after(data, jit_compile=jit_compile) for data in (padded, kept))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    dropped = weights_after(build_pipeline((X, Y), remainder="drop", **options), jit_compile=jit_compile)
    assert not np.allclose(dropped[0], expected[0], rtol=1e-3)


def test_padding_says_what_it_cannot_keep():
    plan = plan_pipeline((X, Y), batch_size=8, remainder="pad")
    assert names(plan)[names(plan).index("prefetch") - 1] == "pad"
    assert "batch-norm statistics" in unwrapped(plan)
    with pytest.raises(ValueError, match="expects examples"):
        plan_pipeline(X, batch_size=8, remainder="pad")


def test_without_a_gpu_nothing_is_copied_ahead():
    plan = plan_pipeline((X, Y), batch_size=8)
    if not tf.config.list_physical_devices("GPU"):
        assert (plan.to_dict()["device"], plan.stage("device").reason) == (None, "no GPU")
    assert plan_pipeline((X, Y), batch_size=8, device=None).to_dict()["device"] is None


@pytest.mark.parametrize("device", ["/gpu:7", "nonsense:x:y:z"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=rf"device that TensorFlow sees.*CPU:0.*Received: '{device}'"):
        plan_pipeline((X, Y), batch_size=8, device=device)


def test_what_is_no_function_of_batches_is_refused():
    with pytest.raises(TypeError, match=r"Expected a function for per_batch\. Received: None"):
        per_batch(None)


def test_what_cannot_be_copied_stays_on_the_host(monkeypatch):
    gpu = type("Gpu", (), {"name": "/device:GPU:0"})
    listed = tf.config.list_logical_devices()
    monkeypatch.setattr(
        placing.tf.config, "list_logical_devices", lambda kind=None: [gpu] if kind == "GPU" else [*listed, gpu]
    )
    assert placing.choose_device("auto", (tf.TensorSpec((2,)),))[0] == "/device:GPU:0"
    notes = [placing.choose_device("auto", tf.TensorSpec((2,), dtype))[1] for dtype in (tf.int32, tf.int64)]
    assert ["come back on each step" in note for note in notes] == [True, False]
    assert placing.choose_device("auto", tf.TensorSpec((2,), tf.string))[0] is None
    assert placing.choose_device("auto", tf.RaggedTensorSpec((None, None)))[0] is None
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert placing.choose_device("auto", tf.TensorSpec((2,)))[0] is None


@pytest.mark.gpu
def test_on_a_gpu_batches_lie_there_before_they_are_asked_for():
    dataset = build_pipeline((X, Y), batch_size=8)
    assert len(dataset) == 3
    assert all("GPU" in x.device for x, _ in dataset)


def test_map_and_batch_are_fused():
    """Their common output is what TensorFlow allocates in pinned memory, from which a copy to a GPU is quick."""
    for options in ({"transform": lambda x, y: (2 * x, y), "cache": None}, {"augment": noisy}):
        assert "MapAndBatch" in stages_run(build_pipeline((X, Y), batch_size=4, **options))


@pytest.mark.parametrize(("cpus", "threads"), [(1.5, 2), (3.0, 3), (4.0, None), (8.0, None)])
def test_threads_follow_the_quota_where_it_is_less_than_the_cpus(monkeypatch, cpus, threads):
    fake = dataclasses.replace(batch_stages.host(), cpus=cpus, affinity=(0, 1, 2, 3))
    monkeypatch.setattr(batch_stages, "host", lambda: fake)
    plan = plan_pipeline(np.zeros(8), batch_size=4)
    assert plan.stage("memory").threads == threads
    options = plan.build().options()
    assert options.threading.private_threadpool_size == threads
    assert options.autotune.cpu_budget == threads
    assert ("as many as this container's CPUs" in unwrapped(plan)) is (threads is not None)


def test_what_is_left_out_by_default_is_said_once(caplog):
    forget_warnings()
    for _ in range(2):
        plan_pipeline(np.zeros(1001), batch_size=100)
    (record,) = caplog.records
    assert record.message.startswith("Of arrays, 1 of 1,001 examples are left out, different ones in each epoch, so ")
    forget_warnings()
    plan_pipeline(np.zeros(1001), batch_size=100, remainder="drop")  # asked for
    plan_pipeline(np.zeros(1000), batch_size=100)
    plan_pipeline(np.zeros(1001), batch_size=100, training=False)
    assert len(caplog.records) == 1
