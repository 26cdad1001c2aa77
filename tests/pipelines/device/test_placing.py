"""What lies on the device: what was asked for, what cache="auto" puts there, and what is refused by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import DeviceMemoryError, PipelineError, UnsupportedError
from tfopt.pipelines import CentralCrop, RandomCrop, Source, build_pipeline, per_batch, plan_pipeline
from tfopt.pipelines.device import placing
from tfopt.pipelines.device.device_stage import stage_of
from tfopt.pipelines.device.placing import OnDevice, find_obstacles
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.stages import arrangement

X, Y = np.zeros((64, 128, 128), "float64"), np.arange(64)  # 8 MiB
FEW = X[:8, :4, :4]


def flip(x, y):
    return x[::-1], y


def in_python(x, y):
    return tf.ensure_shape(tf.py_function(lambda z: z, [x], x.dtype), x.shape), y


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cache_after": "decode"}, "expects `transform` to be done once. Found cache_after='decode'"),
        ({"device": None}, "expects a device. Found device=None"),
        ({"augment": flip}, "expects an `augment` of whole batches. Found flip, which takes single examples. Rewrite"),
        ({"transform": lambda x, y: (tf.as_string(x), y)}, "expects dense tensors of numbers. Found examples with"),
        ({"transform": lambda x, y: (tf.sparse.from_dense(x), y)}, "Found examples with SparseTensorSpec"),
        ({"device": "/gpu:7"}, "device that TensorFlow sees"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, text):
    with pytest.raises(ValueError, match="xpect") as error:
        plan_pipeline((FEW, Y[:8]), batch_size=4, cache="device", **options)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("found", "dataset"),
    [
        ("an endless source", lambda: tf.data.Dataset.range(8).repeat()),
        ("a source of unknown length", lambda: tf.data.Dataset.range(8).filter(lambda number: number > 1)),
    ],
)
def test_the_number_of_examples_must_be_known(found, dataset):
    with pytest.raises(ValueError, match=f"expects a known number of examples. Found {found}"):
        plan_pipeline(Source(name="some", dataset=dataset), batch_size=4, cache="device")


@pytest.mark.slow
def test_a_random_crop_is_refused_and_a_central_one_not(photos):
    with pytest.raises(ValueError, match=r"Found a RandomCrop. Pass CentralCrop, and keras\.layers\.RandomCrop"):
        plan_pipeline(photos, batch_size=4, cache="device", crop=RandomCrop(4))
    dataset = build_pipeline(photos, batch_size=4, cache="device", crop=CentralCrop(4))
    assert dataset.element_spec[0].shape == (4, 4, 4, 3)


def test_examples_of_unlike_shapes_are_refused(photos, picture):
    picture(photos / "abc" / "wide.png", size=(4, 9))
    with pytest.raises(PipelineError, match="Expected examples of one shape"):
        plan_pipeline(photos, batch_size=4, cache="device")


def test_a_strategy_is_refused():
    with (
        tf.distribute.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(
            UnsupportedError, match=r"Found a tf\.distribute strategy.*Build the pipeline with cache='memory'"
        ),
    ):
        plan_pipeline((FEW, Y[:8]), batch_size=4, cache="device")


@pytest.mark.slow
def test_data_take_half_of_what_is_free(free_memory):
    def plan():
        return plan_pipeline((X, Y), batch_size=4, cache="device", device="/device:CPU:0")

    free_memory(17.0)
    reason = "asked for; 8.0 MiB, within half of the 17.0 MiB free on /device:CPU:0"
    assert plan().stage("cache").reason == reason
    needed = r"8\.0 MiB are needed, and exceed half of the 15\.0 MiB free on /device:CPU"
    for mib, text in ((15.0, needed), (None, "free on /device:CPU:0 is unknown")):
        free_memory(mib)
        with pytest.raises(DeviceMemoryError, match=text):
            plan()


@pytest.fixture
def as_gpu(monkeypatch):
    """Has the planner take CPU:0 for a GPU with as many free MiB; data are copied as to a CPU."""

    def set_mib(mib):
        for module in (placing, arrangement):
            monkeypatch.setattr(module, "is_gpu", lambda device: device is not None)
        monkeypatch.setattr(placing, "free_bytes", lambda device: mib * 2**20)

    return set_mib


@pytest.mark.parametrize("mib", [7.0, None])
def test_the_examples_need_not_fit_in_host_memory(as_gpu, free_memory, mib):
    as_gpu(1024)
    free_memory(mib)
    for options in ({"cache": "device"}, {"device": "CPU:0"}):
        plan = plan_pipeline((X, Y), batch_size=16, training=False, **options)
        assert plan.to_dict()["on_device"] is True
        assert plan.to_dict()["memory_mib"] == 1024  # batches ahead


def test_auto_keeps_both_ways(as_gpu):
    as_gpu(33)
    plan = plan_pipeline((X, Y), batch_size=16, device="CPU:0", training=False)
    held = plan.stage("device").held
    assert isinstance(held, OnDevice)
    assert (held.only, held.bytes, plan.to_dict()["cache"]) == (False, X.nbytes + Y.nbytes, None)
    assert "with tfopt.fit.overlap the examples lie on CPU:0" in unwrapped(plan)
    dataset = plan.build()
    stage = stage_of(dataset)
    found = [[np.asarray(part) for part in stage.batch(element)] for element in stage.elements]
    for batch, plain in zip(found, dataset, strict=True):
        for part, expected in zip(batch, plain, strict=True):
            np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "8.0 MiB are needed, and exceed a quarter of the 31.0 MiB free on CPU:0"),
        ({"augment": per_batch(flip)}, "`augment` draws otherwise on the device"),
        ({"seed": 1}, "under a seed the order must not depend on free memory"),
        ({"transform": in_python}, "calls Python"),
        ({"cache_after": "decode"}, "expects `transform` to be done once; found cache_after='decode'"),
    ],
)
def test_auto_says_why_not(as_gpu, options, reason):
    as_gpu(31)
    plan = plan_pipeline((X, Y), batch_size=16, device="CPU:0", **options)
    assert reason in next(stage.reason for stage in plan.stages if stage.name == "overlap")
    assert stage_of(plan.build()) is None
    assert plan.to_dict()["on_device"] is False


def test_an_order_without_shuffle_may_lie_there_under_a_seed(as_gpu):
    as_gpu(64)
    assert isinstance(
        plan_pipeline((X, Y), batch_size=16, device="CPU:0", seed=1, shuffle=False).stage("device").held, OnDevice
    )


@pytest.mark.parametrize("device", [pytest.param("auto", marks=pytest.mark.no_gpu), "CPU:0", None])
def test_a_cpu_is_never_taken_unasked(device):
    for cache in ("auto", "memory", None):
        plan = plan_pipeline((FEW, Y[:8]), batch_size=4, cache=cache, device=device)
        assert plan.stage("device").held is None
        assert "overlap" not in [stage.name for stage in plan.stages]


def test_what_is_free_on_a_gpu_is_what_tensorflow_does_not_use(monkeypatch):
    monkeypatch.setattr(placing, "limit_bytes", lambda device: 100)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"current": 30, "peak": 90})
    assert placing.free_bytes("/device:GPU:0") == 70
    assert placing.free_bytes("/device:CPU:0") == 16384.0 * 2**20


BATCH = (tf.TensorSpec((4, 8, 8, 3), tf.uint8), tf.TensorSpec((4, 5)))


def bicubic(x, y):
    return tf.image.resize(x, (6, 6), "bicubic"), y


def seeded(x, y, seed):
    return tf.image.stateless_random_brightness(x, 0.1, seed), y


@pytest.mark.parametrize(
    ("function", "obstacle"),
    [
        (keras.layers.RandomBrightness(0.1), None),
        (keras.Sequential([keras.layers.RandomFlip()]), None),
        (keras.layers.RandomRotation(0.1), "supports_jit is False"),
        (keras.Sequential([keras.layers.RandomTranslation(0.1, 0.1)]), "supports_jit is False"),
        (keras.layers.MixUp(), "XLA has no StatelessRandomGammaV3"),  # although its supports_jit is True
        (per_batch(seeded), None),
        (per_batch(bicubic), "XLA has no ResizeBicubic"),
        (per_batch(in_python), "XLA has no EagerPyFunc"),
    ],
)
def test_what_xla_cannot_compile_is_named(function, obstacle):
    assert find_obstacles(PipelineOptions(augment=function, cache="device"), BATCH) == (obstacle,)


def test_each_function_is_given_what_the_ones_before_it_make():
    shapes = []

    def looking(x, y):
        shapes.append(x.shape)
        return x, y

    options = PipelineOptions(augment=[per_batch(bicubic), per_batch(looking)], cache="device")
    assert find_obstacles(options, BATCH) == ("XLA has no ResizeBicubic", None)
    assert set(shapes) == {tf.TensorShape((4, 6, 6, 3))}


def test_single_tensors_and_no_functions():
    assert find_obstacles(PipelineOptions(), BATCH) == ()
    assert find_obstacles(PipelineOptions(augment=per_batch(tf.abs)), tf.TensorSpec((4, 2))) == (None,)
