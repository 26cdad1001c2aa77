"""Decisions on real steps: their times made up, or made unlike by a planted layer that sleeps."""

import json
import re
import time
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state
from planted_layers import Noise, Opaque, ScaledUnderXla, ScaledWithoutXla, SlowUnderXla, SlowWithoutXla
from quick import first_quick

from tfopt.errors import PipelineError
from tfopt.measure import StepTimer, StepTimes, compare
from tfopt.xla import decide, deciding, drift, explain, set_jit, shapes
from tfopt.xla.shapes import batch_shapes

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def net(*layers, dropout=0.0, shape=(8, 8, 1)):
    model = keras.Sequential([keras.Input(shape), *layers, keras.layers.Flatten(), keras.layers.Dropout(dropout)])
    model.add(keras.layers.Dense(10, dtype="float32"))
    model.compile("adam", LOSS, jit_compile=False)
    return model


@pytest.fixture
def timed(monkeypatch):
    """Real steps whose times are made up: ms with XLA and without, 1 s for the first call without and 3 s with.

    Returns a function of the two; it returns the list of settings of every step that is traced from then on.
    """

    def plan(off, on):
        traced = []

        class Timer(StepTimer):
            def __init__(self, model, data, *, jit_compile):
                super().__init__(model, data, jit_compile=jit_compile)
                traced.append(jit_compile)
                self.jit_compile = jit_compile

            def __call__(self, *steps, **options):
                ms = on if self.jit_compile else off
                return replace(super().__call__(*steps, **options), repeats_ms=((ms,),))

        def first_call(timer):
            first(timer)
            return 3.0 if timer.jit_compile else 1.0

        first = deciding._first_call
        monkeypatch.setattr(deciding, "StepTimer", Timer)
        monkeypatch.setattr(deciding, "_first_call", first_call)
        monkeypatch.setattr(drift, "StepTimer", Timer)
        monkeypatch.setattr(shapes, "StepTimer", Timer)
        # All batches are read, however slow the machine.
        monkeypatch.setattr(deciding, "batch_shapes", lambda data, seconds: batch_shapes(data, seconds=600.0))
        return traced

    return plan


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_is_faster_and_the_same_is_on_and_nothing_changes(timed, dropout):
    traced = timed(off=10.0, on=5.0)
    model = net(dropout=dropout)
    model.fit(*batch(), verbose=0)
    before, function = state(model), model.train_function
    decision = decide(model, batch(32), steps=10, planned_steps=500)
    assert_same_state(before, state(model))
    assert (model.jit_compile, model.train_function) == (False, function)
    assert decision.enabled
    assert decision.drift < 1e-3
    assert decision.compile_seconds == pytest.approx(2.0 + 2 * 0.005)  # two steps of each first call are no compiling
    assert decision.break_even_steps == 402
    assert traced == ([False, True, False, True] if dropout else [False, True])
    assert len(decision.off.repeats_ms) == len(decision.on.repeats_ms) == 5
    assert decision.on.steps_per_sample == 2  # ten steps in five turns, with one wait a turn
    assert decision.comparison == compare(decision.off, decision.on)
    assert decision.speedup == 2.0
    values = json.loads(json.dumps(decision.to_dict()))
    assert StepTimes.from_dict(values["on"]) == decision.on
    decision.apply(model)
    assert model.jit_compile is True


@pytest.mark.slow
@pytest.mark.parametrize("layer", [SlowWithoutXla, SlowUnderXla])
def test_it_agrees_with_timing_by_hand(layer):
    model = net(layer())
    decision = decide(model, batch(32), steps=10)
    seconds = {}
    for on in (False, True):
        model.compile("adam", LOSS, jit_compile=on)
        model.fit(*batch(32), batch_size=32, verbose=0)  # compiles
        started = time.perf_counter()
        model.fit(tf.data.Dataset.from_tensors(batch(32)).repeat(10), verbose=0, shuffle=False)
        seconds[on] = time.perf_counter() - started
    assert (decision.speedup > 1) == (seconds[True] < seconds[False]) == (layer is SlowWithoutXla)
    assert decision.comparison == compare(decision.off, decision.on)
    assert decision.compile_seconds > 0


@pytest.mark.slow
def test_slower_needs_no_more_than_two_traces(timed):
    traced = timed(off=5.0, on=10.0)
    decision = decide(net(dropout=0.5), batch(32), steps=5)
    assert not decision.enabled
    assert (decision.comparison.verdict, decision.drift, decision.pad) == ("slower", None, None)
    assert traced == [False, True]


@pytest.mark.slow
def test_too_few_steps_planned(timed):
    traced = timed(off=10.0, on=5.0)
    decision = decide(net(dropout=0.5), batch(32), steps=5, planned_steps=401)
    assert not decision.enabled
    assert (decision.planned_steps, decision.break_even_steps) == (401, 402)
    assert "paid back after 402 steps of 401 planned" in decision.reason
    assert (decision.pad, decision.drift, traced) == (None, None, [False, True])


@pytest.mark.slow
def test_a_last_smaller_batch_is_compiled_too(timed):
    timed(off=10.0, on=5.0)
    dataset = tf.data.Dataset.from_tensor_slices(batch(80)).batch(32)
    decision = decide(net(), dataset, steps=5)
    assert decision.enabled
    assert (decision.shapes.count, decision.shapes.steps_per_epoch, decision.break_even_steps) == (2, 3, 804)
    few = decide(net(), dataset, steps=5, planned_steps=500)
    assert not few.enabled
    assert few.pad.shape == ((32, 8, 8, 1), (32,))  # as measured: no further compilation
    # A mean batch has five sixths of the numbers, so a step without XLA takes 8.3 ms.
    assert few.pad.break_even_steps == pytest.approx(2010 / (10 * 5 / 6 - 5), abs=2)
    assert "Padded to one shape, (32, 8, 8, 1), (32,), XLA would pay after 60" in few.reason


def sequences(lengths, examples=8):
    random = np.random.default_rng(0)

    def batches():
        for length in lengths:
            yield random.random((examples, length, 8), "float32"), random.integers(10, size=examples).astype("int32")

    signature = tf.TensorSpec((None, None, 8)), tf.TensorSpec((None,), tf.int32)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def sequence_net():
    model = keras.Sequential([keras.Input((None, 8)), keras.layers.GlobalAveragePooling1D()])
    model.add(keras.layers.Dense(10))
    model.compile("sgd", LOSS, jit_compile=False)
    return model


def test_ragged_batches_leave_it_off_and_name_the_shape_that_would_pay(timed):
    traced = timed(off=10.0, on=5.0)
    model = sequence_net()
    before = state(model)
    decision = decide(model, sequences(range(5, 24)), steps=5)
    assert not decision.enabled
    assert decision.shapes.count == 19
    assert decision.break_even_steps is None
    assert decision.pad.shape == ((8, 24, 8), (8,))  # 23, and the next multiple of 8
    assert decision.pad.measured
    assert "Padded to one shape, (8, 24, 8), (8,), XLA would pay after" in decision.reason
    assert traced == [False, True, True]  # one compilation more
    assert_same_state(before, state(model))
    assert json.loads(json.dumps(decision.to_dict()))["pad"]["shape"] == [[8, 24, 8], [8]]


def test_where_xla_is_slower_no_shape_is_tried(timed):
    timed(off=5.0, on=10.0)
    decision = decide(sequence_net(), sequences(range(5, 24)), steps=5)
    assert not decision.enabled
    assert decision.pad is None


@pytest.mark.slow
def test_what_xla_computes_wrongly_is_off(timed):
    timed(off=10.0, on=5.0)
    decision = decide(net(ScaledUnderXla(-3.0)), batch(32), steps=5)
    assert not decision.enabled
    assert decision.drift > 0.1
    assert "XLA computes something else" in decision.reason
    assert decide(net(ScaledUnderXla(-3.0)), batch(32), steps=5, tolerance=None).enabled


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
@pytest.mark.parametrize(
    ("layer", "enabled", "said"),
    [
        (lambda: ScaledWithoutXla(3.0), True, "above the tolerance of 0.1. Its results .*So XLA is not to blame"),
        (lambda: ScaledUnderXla(-3.0), False, "XLA computes something else. .* by 4 with XLA, by 0.* without"),
    ],
    ids=["TensorFlow is wrong", "XLA is wrong"],
)
def test_in_16_bits_only_what_xla_computes_wrongly_is_off(timed, policy, layer, enabled, said):
    timed(off=10.0, on=5.0)
    keras.config.set_dtype_policy(policy)
    model = net(layer())
    model.fit(*batch(), verbose=0)
    before = state(model)
    decision = decide(model, batch(32), steps=5)
    assert decision.enabled == enabled
    assert decision.drift > 0.1
    assert re.search(said, decision.reason)
    assert_same_state(before, state(model))


def test_what_xla_is_known_to_get_wrong_never_runs():
    """Under XLA a cumulative sum of a mask ends the process."""

    class Masked(keras.layers.Layer):
        def call(self, inputs):
            return inputs + tf.reduce_max(tf.cumsum(tf.boolean_mask(inputs, inputs > 0)))

    model = keras.Sequential([keras.Input((8, 8, 1)), Masked(name="culprit"), keras.layers.Flatten()])
    model.add(keras.layers.Dense(10))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    decision = decide(model, batch(), tolerance=None)
    assert not decision.enabled
    assert f"XLA gets Cumsum in layer {model.name}/culprit" in decision.reason


@pytest.mark.slow
def test_what_cannot_be_compared_is_off(timed):
    timed(off=10.0, on=5.0)
    decision = decide(net(Noise()), batch(), steps=5)
    assert not decision.enabled
    assert "drift unknown, since the model draws random numbers outside dropout" in decision.reason


@pytest.mark.slow
def test_what_xla_cannot_compile_is_off_with_the_reason(timed):
    traced = timed(off=10.0, on=5.0)
    decision = decide(net(Opaque()), batch(), steps=5)
    assert not decision.enabled
    assert re.search(r"no kernel for EagerPyFunc in layer .*opaque", decision.reason)
    rotated = decide(net(keras.layers.RandomRotation(0.1)), batch())
    assert not rotated.enabled
    assert "random_rotation" in rotated.reason
    assert (rotated.speedup, traced[-1]) == (None, False)


def test_a_dataset_that_shuffles_is_compared_on_one_batch(timed):
    timed(off=10.0, on=5.0)
    dataset = tf.data.Dataset.from_tensor_slices(batch(200)).shuffle(200).batch(32, drop_remainder=True)
    assert decide(net(), dataset, steps=5).drift < 1e-3


def test_what_fails_without_xla_is_raised():
    class Checks(keras.layers.Layer):
        def call(self, inputs):
            with tf.control_dependencies([tf.debugging.assert_less(inputs, 0.0, "no images")]):
                return tf.identity(inputs)

    with pytest.raises(tf.errors.InvalidArgumentError, match="no images"):
        decide(net(Checks()), batch(), steps=5)


def test_a_dataset_that_fails_later_is_no_fault_of_xla():
    def batches():
        yield batch(32)
        raise RuntimeError("disk gone")

    signature = tf.TensorSpec((None, 8, 8, 1)), tf.TensorSpec((None,), tf.int32)
    with pytest.raises(PipelineError, match=r"Found: .*disk gone.* Fix its source") as told:
        decide(net(), tf.data.Dataset.from_generator(batches, output_signature=signature), steps=5)
    assert isinstance(told.value.__cause__, tf.errors.OpError)


def test_a_dataset_that_can_be_read_once_may_have_one_batch():
    once = iter([batch(32)])
    signature = tf.TensorSpec((None, 8, 8, 1)), tf.TensorSpec((None,), tf.int32)
    decision = decide(net(), tf.data.Dataset.from_generator(lambda: once, output_signature=signature), steps=5)
    assert decision.shapes.seen == (((32, 8, 8, 1), (32,)),)


@pytest.mark.parametrize(
    "arguments",
    [
        *({name: value} for name in ("steps", "planned_steps") for value in (0, 2.5, True, "9")),
        {"tolerance": -1.0},
        {"tolerance": float("nan")},
        {"tolerance": "a"},
        {"tolerance": True},
    ],
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"Expected {next(iter(arguments))} to be .* Received: .* Pass "):
        decide(small_net(), batch(), **arguments)


@pytest.mark.parametrize("y", [batch()[1], list(batch()[1]), tf.constant(batch()[1])])
def test_targets_belong_to_the_batch(y):
    with pytest.raises(TypeError, match=r"steps of type .*\. Pass a batch as a tuple: decide\(model, \(x, y\)\)"):
        decide(small_net(), batch()[0], y)


def frozen():
    model = small_net()
    model.trainable = False
    return model


def empty():
    model = keras.Sequential([])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("model", [frozen, empty])
def test_a_model_with_nothing_to_train_is_refused(model):
    with pytest.raises(ValueError, match=r"Expected a model with weights to train\. Received: .* Add layers, or set"):
        decide(model(), batch())


def test_what_is_no_compiled_model_is_refused():
    with pytest.raises(ValueError, match=r"not compiled\. Call model\.compile"):
        decide(small_net(compiled=False), batch())
    with pytest.raises(TypeError, match=r"Expected a keras\.Model\. Received: 3 of type int"):
        decide(3, batch())


def test_a_batch_of_another_shape_is_refused():
    images, labels = batch()
    with pytest.raises(ValueError, match=r"Expected a batch that 'sequential.*' can train on\. Found: .* Pass") as told:
        decide(small_net(), (images[:, :5], labels))
    assert isinstance(told.value.__cause__, ValueError)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_batch_that_is_not_finite_is_refused(value):
    images, labels = batch()
    images[3, 2] = value
    with pytest.raises(PipelineError, match=r"Found NaN or infinity in x\. Clean the data"):
        decide(small_net(), (images, labels))
    with pytest.raises(PipelineError, match="infinity in sample_weight"):
        decide(small_net(), (*batch(), images[:, 2, 0, 0]))
    assert decide(net(), (images, labels), steps=5, tolerance=None).comparison


class Window(keras.layers.Layer):
    """Takes four rows from where a batch, or a draw of its own, says."""

    def __init__(self, drawn):
        super().__init__()
        self.seed = keras.random.SeedGenerator(0) if drawn else None

    def call(self, images, start):
        if self.seed is not None:
            start = keras.random.randint((1,), 0, 5, seed=self.seed)
        return tf.slice(images, [0, start[0], 0, 0], [-1, 4, -1, -1])


def window_net(drawn=False):
    images, start = keras.Input((8, 8, 1)), keras.Input((), dtype="int32")
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(Window(drawn)(images, start)))
    model = keras.Model([images, start], outputs)
    model.compile("sgd", LOSS, jit_compile=False)
    return model


def windows(batches):
    """Batches of eight examples, the first from row 0, the second from row 1."""
    images, labels = batch(8 * batches)
    start = np.repeat(np.arange(batches, dtype="int32"), 8)
    return tf.data.Dataset.from_tensor_slices(((images, start), labels)).batch(8, drop_remainder=True)


@pytest.mark.slow
def test_what_is_compiled_again_for_each_value_is_refused(timed):
    timed(off=10.0, on=5.0)
    model = window_net()
    before = state(model)
    decision = decide(model, windows(4), steps=5)
    assert not decision.enabled
    assert "depends on the values of tensor 1 of the batch" in decision.reason
    assert_same_state(before, state(model))
    alone = decide(model, next(iter(windows(1))), steps=5)  # one batch is compiled once
    assert not alone.enabled
    assert "depends on the values of tensor 1 of the batch" in alone.reason


@pytest.mark.slow
def test_what_is_compiled_again_for_each_value_drawn_in_the_model_is_refused(timed):
    timed(off=10.0, on=5.0)
    model = window_net(drawn=True)
    before = state(model)
    decision = decide(model, next(iter(windows(1))), steps=5, tolerance=None)
    assert not decision.enabled
    assert re.search(r"depends on the values of seed_generator\S*/seed_gen", decision.reason)
    found = explain(model, next(iter(windows(1))))
    assert [one.kind for one in found.obstacles] == ["recompilation"]
    assert str(found).startswith("XLA compiles this model again and again on a ")
    assert_same_state(before, state(model))


@pytest.mark.slow
@pytest.mark.parametrize("tool", [explain, decide, lambda model, data: set_jit(model, True, data=data)])
def test_indices_out_of_range_are_named_before_xla_hides_them(tool):
    """Without XLA they are an error on a CPU, with it the last entry is taken."""
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(10, 8), keras.layers.Flatten()])
    model.add(keras.layers.Dense(10))
    model.compile("sgd", LOSS)
    indices, labels = np.zeros((8, 4), "int32"), np.zeros(8, "int32")
    indices[5, 2] = labels[3] = 12
    for x, y, found in ((indices, labels * 0, r"indices\[5,2\] = 12 is not in \[0, 10\)"), (indices * 0, labels, "12")):
        with pytest.raises(ValueError, match=f"within the range of what .* Found: .*{found}.*D29") as told:
            tool(model, (x, y))
        assert "File" not in str(told.value)


def test_no_data_is_refused():
    with pytest.raises(PipelineError, match="Expected a dataset of at least one batch"):
        decide(net(), tf.data.Dataset.from_tensor_slices(batch(8)).batch(16, drop_remainder=True))
    with pytest.raises(TypeError, match=r"Expected a tf\.data\.Dataset of batches or one batch"):
        decide(net(), [1, 2])
