"""The device stage, on a CPU device: every example once an epoch, the batches of the other caches, never numbers."""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick
from unwrapped import unwrapped

from tfopt.errors import DeviceMemoryError, PipelineError, UnsupportedError
from tfopt.pipelines import Source, build_pipeline, per_batch, plan_pipeline, profile_pipeline
from tfopt.pipelines.device import device_stage
from tfopt.pipelines.device.device_stage import batch_functions, stage_of
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.stages import device_stages

X = np.random.default_rng(0).integers(0, 256, size=(22, 3, 3, 1)).astype("uint8")
Y = np.arange(22, dtype="int32")
DATA = (X, Y)


def epoch(dataset):
    """The batches of one epoch, made by the stage where the dataset has one."""
    stage = stage_of(dataset)
    batches = dataset if stage is None else map(stage.batch, stage.elements)
    return [tf.nest.map_structure(lambda part: part.numpy(), batch) for batch in batches]


def labels(batches):
    return np.concatenate([batch[1] for batch in batches]).tolist()


def assert_same(one, other):
    tf.nest.assert_same_structure(one, other)
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def shifted(x, y, seed):
    """Shows its seed in the batch."""
    return tf.cast(x, tf.int32) + seed[0] % 7, y


def by_text(x, y, seed):
    """The same, by operations that XLA lacks; the second number tells its seed from that of the function before."""
    return 10 * x + tf.strings.to_number(tf.as_string(seed[0] % 7 + seed[1]), tf.int32), y


def half(x, y):
    return x // 2, y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remainder", "batch_size", "training"),
    first_quick([("drop", 5, True), ("keep", 5, True), ("pad", 5, False), ("keep", 11, True), (None, 5, False)], 2),
)
def test_batches_in_order_are_those_of_the_cache_in_memory(remainder, batch_size, training):
    functions = [per_batch(shifted), per_batch(by_text)]
    chosen = {"training": training, "shuffle": False, "transform": half, "augment": functions, "seed": 1}
    device, memory = (
        build_pipeline(DATA, batch_size=batch_size, remainder=remainder, cache=cache, **chosen)
        for cache in ("device", "memory")
    )
    stage = stage_of(device)
    assert device.element_spec == memory.element_spec == stage.element_spec
    assert len(device) == len(memory) == stage.steps == len(stage.elements)
    first, second = epoch(device), epoch(device)
    assert_same(first, epoch(memory))
    assert_same(second, epoch(memory))  # the seeds of the second epoch
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("remainder", ["keep", "pad", "drop"])
def test_each_example_comes_once_an_epoch_in_a_new_order(remainder):
    dataset = build_pipeline(DATA, batch_size=5, cache="device", remainder=remainder)
    orders = []
    for _ in range(3):
        batches = epoch(dataset)
        weights = [batch[2] if remainder == "pad" else np.ones(len(batch[1])) for batch in batches]
        own = np.concatenate(weights) > 0
        orders.append(tuple(np.asarray(labels(batches))[own].tolist()))
        for x, y in (batch[:2] for batch in batches):
            np.testing.assert_array_equal(x, X[y])
    assert {(len(order), len(set(order))) for order in orders} == {(20, 20) if remainder == "drop" else (22, 22)}
    assert len(set(orders)) == 3
    assert len(set(map(frozenset, orders))) == (3 if remainder == "drop" else 1)  # each epoch leaves out others


@pytest.mark.gpu
@pytest.mark.parametrize("remainder", ["drop", "keep", "pad"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool", "int32"])
def test_on_a_gpu_batches_are_those_of_the_cache_in_memory(remainder, dtype):
    data, chosen = (X.astype(dtype), Y), {"batch_size": 5, "remainder": remainder, "training": False}
    device = build_pipeline(data, cache="device", **chosen)
    memory = build_pipeline(data, cache="memory", device=None, **chosen)
    assert "GPU" in stage_of(device).device
    assert_same(epoch(device), epoch(memory))


@pytest.mark.slow
def test_under_a_seed_each_run_is_the_same_and_each_epoch_new():
    def build():
        return build_pipeline(DATA, batch_size=5, cache="device", seed=3, augment=[per_batch(shifted)])

    one = build()
    tf.random.set_seed(5)
    other = build()
    runs = [[epoch(dataset) for _ in range(2)] for dataset in (one, other)]
    assert_same(runs[0], runs[1])
    assert labels(runs[0][0]) != labels(runs[0][1])
    unlike = build_pipeline(DATA, batch_size=5, cache="device", seed=4)
    assert labels(epoch(unlike)) != labels(runs[0][0])


def test_images_of_files_are_those_of_the_cache_in_memory_and_shuffled_by_the_seed(photos):
    chosen = {"batch_size": 4, "transform": lambda image, label: (image + 1, label), "seed": 2}
    device, memory = (build_pipeline(photos, cache=cache, training=False, **chosen) for cache in ("device", "memory"))
    assert device.element_spec[0].dtype == tf.uint8
    assert device.element_spec == memory.element_spec
    assert_same(epoch(device), epoch(memory))
    runs = [epoch(build_pipeline(photos, cache="device", **chosen)) for _ in range(2)]
    assert_same(*runs)
    shades = [int(shade) for batch, _ in runs[0] for shade in batch[:, 1, 0, 0]]
    assert sorted(shades) == list(range(1, 13)) != shades


@pytest.mark.slow
def test_examples_of_many_chunks_lie_in_their_places(monkeypatch):
    monkeypatch.setattr(device_stages, "_CHUNK_BYTES", 4 * (X[0].nbytes + 4))
    for options in ({}, {"transform": half, "seed": 1}):  # rows are gathered, examples are batched
        for x, y in epoch(build_pipeline(DATA, batch_size=5, cache="device", **options)):
            np.testing.assert_array_equal(x, X[y] // 2 if options else X[y])


def test_every_type_of_number_comes_back_as_it_was():
    types = ["bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"]
    data = {name: np.arange(-3, 3).astype(name) for name in types}
    data["bfloat16"] = tf.cast(np.arange(-3, 3), tf.bfloat16)
    batch = epoch(build_pipeline(data, batch_size=6, cache="device", training=False))[0]
    assert_same(batch, {name: np.asarray(values) for name, values in data.items()})


def test_the_full_batches_have_static_shapes_and_are_on_the_device():
    stage = stage_of(build_pipeline(DATA, batch_size=5, cache="device", device="CPU:0", remainder="drop"))
    assert stage.element_spec[0].shape == (5, 3, 3, 1)
    assert stage.device == "CPU:0"
    assert stage.batch(next(iter(stage.elements)))[0].device.endswith("CPU:0")


def test_examples_are_read_once_and_by_one_thread():
    calls = []

    def counted(x, y):
        tf.py_function(lambda: calls.append(1), [], [])
        return x, y

    stage = stage_of(build_pipeline(DATA, batch_size=5, transform=counted, cache="device"))
    assert len(calls) <= len(X)  # the planner's
    calls.clear()
    elements = list(stage.elements)
    threads = [threading.Thread(target=stage.batch, args=(elements[0],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for element in elements + list(stage.elements):
        stage.batch(element)
    assert len(calls) == len(X)


@pytest.mark.slow
def test_the_examples_are_freed_with_the_dataset():
    dataset = build_pipeline(DATA, batch_size=5, cache="device", augment=keras.layers.Rescaling(2.0))
    stage = stage_of(dataset)
    stage.batch(next(iter(stage.elements)))
    rows = weakref.ref(stage._rows[0])
    del dataset
    gc.collect()
    assert rows() is not None
    del stage
    gc.collect()
    assert rows() is None


def fitted(dataset, **options):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(dataset, verbose=0, shuffle=False, **options)


@tf.function
def counted_in_a_graph(dataset):
    total = 0
    for _ in dataset:
        total += 1
    return total


OVERLAP_MISSING = r"Expected tfopt\.fit\.overlap\(model\) before `fit`"


@pytest.mark.parametrize("use", [iter, fitted, lambda dataset: fitted(dataset, steps_per_epoch=2)])
def test_without_overlap_there_is_an_error(use):
    with pytest.raises(PipelineError, match=OVERLAP_MISSING):
        use(build_pipeline(DATA, batch_size=5, cache="device"))


@pytest.mark.parametrize(
    "use",
    [
        lambda dataset: fitted(dataset.take(2)),
        lambda dataset: fitted(dataset, class_weight=dict.fromkeys(range(22), 1.0)),
        lambda dataset: list(dataset.map(lambda x, y: x)),
        lambda dataset: dataset.reduce(0, lambda total, batch: total + 1),
        counted_in_a_graph,
    ],
    ids=["take", "class_weight", "map", "reduce", "graph"],
)
def test_what_is_derived_from_it_fails_too_and_never_gives_a_batch(use):
    dataset = build_pipeline(DATA, batch_size=5, cache="device", transform=half)
    with pytest.raises(tf.errors.InvalidArgumentError, match=OVERLAP_MISSING):
        use(dataset)
    assert stage_of(dataset.take(1)) is None


@pytest.mark.parametrize(
    "make", [lambda: build_pipeline(DATA, batch_size=5, cache="memory"), lambda: tf.data.Dataset.range(3), lambda: None]
)
def test_other_datasets_have_no_stage(make):
    assert stage_of(make()) is None


def first_batch(dataset):
    stage = stage_of(dataset)
    return stage.batch(next(iter(stage.elements)))


def test_an_example_that_cannot_be_read_is_named(photos):
    dataset = build_pipeline(photos, batch_size=5, cache="device", transform=lambda image, label: (image / 2, label))
    next(photos.rglob("*.png")).write_bytes(b"no image")
    with pytest.raises(PipelineError, match="Expected to read 12 examples") as error:
        first_batch(dataset)
    assert isinstance(error.value.__cause__, tf.errors.OpError)


def test_a_source_with_fewer_examples_than_it_says_fails():
    def few():
        return tf.data.Dataset.from_generator(lambda: iter(range(8)), output_signature=tf.TensorSpec((), tf.int32))

    with pytest.raises(PipelineError, match=r"Expected to read 10 examples.*contained only 8"):
        first_batch(build_pipeline(Source(name="few", dataset=few, count=10), batch_size=5, cache="device"))


def test_a_full_device_is_told(monkeypatch):
    def full(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    stage = stage_of(build_pipeline(DATA, batch_size=5, cache="device", device="/device:CPU:0"))
    element = next(iter(stage.elements))
    monkeypatch.setattr(device_stage.tf, "zeros", full)
    with pytest.raises(DeviceMemoryError, match=r"Expected room for 286 B of examples on /device:CPU:0"):
        stage.batch(element)


def test_the_plan_says_where_what_is_done():
    layers = [keras.layers.RandomFlip(), keras.layers.RandomRotation(0.1)]
    options = {"cache": "device", "device": "/device:CPU:0", "remainder": "pad", "augment": layers}
    plan = plan_pipeline(DATA, batch_size=5, **options)
    names = [stage.name for stage in plan.stages]
    assert names[2:] == [
        *("cache", "shuffle", "batch", "gather", "augment", "augment", "pad"),
        *("prefetch", "device", "overlap", "order", "memory"),
    ]
    text = unwrapped(plan)
    for said in (
        "within half of the 16.0 GiB free on /device:CPU:0",
        "all 22 ",
        "RandomFlip whole batches on the device, compiled by XLA; a fresh seed",
        "RandomRotation whole batches on the device, without XLA: supports_jit is False",
        "without it `fit` is refused",
    ):
        assert said in text
    assert (plan.to_dict()["cache"], plan.to_dict()["on_device"]) == ("device", True)


def test_the_profiler_refuses_it():
    plan = plan_pipeline(DATA, batch_size=5, cache="device")
    for given in (plan, plan.build()):
        with pytest.raises(UnsupportedError, match="Found cache='device'"):
            profile_pipeline(given, seconds=0.1)


ROW = (tf.TensorSpec((2,), tf.uint8), tf.TensorSpec((), tf.int32))
ROWS = [tf.constant([[0, 1], [2, 3], [4, 5]], tf.uint8), tf.constant([7, 8, 9], tf.uint32)]


def functions(augment, obstacles, **options):
    return batch_functions(PipelineOptions(augment=augment, cache="device", batch_size=2, **options), obstacles, ROW)


def is_compiled(function, *arguments):
    return function.get_concrete_function(*arguments).function_def.attr["_XlaMustCompile"].b


@pytest.mark.parametrize(
    ("obstacles", "remainder", "compiled"),
    [
        ((), "keep", [True]),
        ((None, None), "keep", [True]),
        (("no", None), "keep", [True, False, True]),
        ((None, "no"), "keep", [True, False]),
        (("no", "no"), "keep", [True, False]),
        (("no",), "pad", [True, False, True]),  # filling comes last
        ((None,), "pad", [True]),
    ],
)
def test_neighbours_that_xla_compiles_are_one_function(obstacles, remainder, compiled):
    more = len(obstacles)
    first, *later = functions([per_batch(lambda x, y: (x + 1, y))] * more, obstacles, remainder=remainder)
    numbers = tf.constant([2] if remainder == "pad" else [2, 0], tf.int64)
    batch = first(ROWS, numbers, None)
    found = [is_compiled(first, ROWS, numbers, None)]
    for function in later:
        found.append(is_compiled(function, batch, None))
        batch = function(batch, None)
    assert found == compiled
    expected = [[[4 + more, 5 + more], [more, 1 + more]], [9, 7]]
    if remainder == "pad":
        expected = [[[4 + more, 5 + more]] * 2, [9, 9], [2.0, 0.0]]
    assert [part.numpy().tolist() for part in batch] == expected
    assert batch[1].dtype == tf.int32


def test_a_layer_is_compiled_with_the_gather():
    (only,) = functions(keras.layers.Rescaling(2.0), (None,))
    assert only(ROWS, tf.constant([2, 0]), tf.constant(5, tf.int64))[0].numpy().tolist() == [[8.0, 10.0], [0.0, 2.0]]
