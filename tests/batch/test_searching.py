"""What `find` does with models and data, in this process."""

import contextlib
import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state

from tfopt import memory
from tfopt.batch import BatchSearch, find, searching
from tfopt.batch.trials import Trial
from tfopt.errors import PipelineError, TfoptError, UnsupportedError
from tfopt.internals import sources
from tfopt.measure import StepTimes, timers

SEEDS = getattr(*sources.find("keras.src.random.seed_generator:global_seed_generator"))


def dataset(examples=40, size=8):
    return tf.data.Dataset.from_tensor_slices(batch(examples)).batch(size)


def net(**options):
    """Weights, moments and a metric, quick to trace."""
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential(layers, name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if options != {"compiled": False}:
        model.compile(**{"optimizer": "adam", "loss": loss} | options)
    return model


def sizes(found):
    return [trial.batch_size for trial in found.trials]


def assert_found(found, largest):
    assert found.largest == largest
    assert all(trial.fits for trial in found.trials), found
    assert found.recommended in sizes(found)


@pytest.fixture
def asked(monkeypatch):
    """The trials get batches of these sizes."""
    seen = []
    measured = searching.Trials.__call__

    def note(self, size, within):
        trial = measured(self, size, within)
        parts = [part for part in tf.nest.flatten(self._examples.batch(size)) if part is not None]
        seen.append({len(part) for part in parts})
        assert seen[-1] == {size}
        return trial

    monkeypatch.setattr(searching.Trials, "__call__", note)
    return seen


def drawn():
    """The states of what draws random numbers."""
    own = SEEDS().state.numpy().tolist()  # made at first use, with a seed from random
    return own, random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_model_its_seeds_and_the_data_come_back_as_they_were(here, policy):
    keras.config.set_dtype_policy(policy)
    model = small_net(policy)
    data, twin = (dataset().unbatch().shuffle(40, seed=3).batch(8) for _ in range(2))
    model.fit(dataset(), epochs=2, verbose=0, shuffle=False)
    kept = model.train_function, model.history, model.stop_training, model.jit_compile
    draws = drawn()
    before = state(model)
    found = find(model, data, largest=24)
    assert_found(found, 24)
    assert_same_state(before, state(model))
    assert kept == (model.train_function, model.history, model.stop_training, model.jit_compile)
    assert draws == drawn()
    assert keras.config.dtype_policy().name == policy
    for epoch in range(2):
        orders = [[labels.numpy().tolist() for _, labels in each] for each in (data, twin)]
        assert orders[0] == orders[1], epoch


def failing(monkeypatch, at, error):
    """Makes the `at`-th training step of the trials raise, after it has changed the model."""
    trace, count = timers.trace_train_step, [0]

    def traced(model, given, **options):
        step, graph = trace(model, given, **options)

        def raising(given):
            result = step(given)
            count[0] += 1
            if count[0] == at or at == 0:
                raise error
            return result

        return raising, graph

    monkeypatch.setattr(timers, "trace_train_step", traced)


OOM = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9]")


@pytest.mark.parametrize("at", [1, 2, 5])
def test_memory_that_runs_out_in_a_step_is_a_row(here, unestimated, monkeypatch, at):
    model = net()
    model.fit(*batch(16), verbose=0)
    before, iterations = state(model), int(model.optimizer.iterations)
    failing(monkeypatch, at, OOM)
    found = find(model, dataset(), largest=32)
    assert_same_state(before, state(model))
    assert int(model.optimizer.iterations) == iterations
    (failed,) = (trial for trial in found.trials if not trial.fits)
    assert (failed.outcome, failed.times) == ("out of memory", None)
    assert "OOM when allocating" in failed.reason
    assert 0 < found.recommended <= found.largest
    assert f"{failed.batch_size}: out of memory: OOM" in str(found)


@pytest.mark.slow
def test_memory_that_runs_out_in_every_step_there_is(here, unestimated, monkeypatch):
    model = net()
    model.fit(*batch(16), verbose=0)
    before = state(model)
    for at in range(1, 22):
        with monkeypatch.context() as patch:
            failing(patch, at, OOM)
            found = find(model, dataset(), largest=32)
        assert_same_state(before, state(model))
        assert sum(not trial.fits for trial in found.trials) <= 1
        assert 0 < found.recommended <= found.largest <= 32


class Huge(keras.layers.Layer):
    """Takes more than any machine has, from 32 examples on."""

    def call(self, inputs):
        if inputs.shape[0] is None or inputs.shape[0] < 32:
            return inputs
        wide = tf.random.uniform(tf.stack([tf.shape(inputs, tf.int64)[0], 2**42]))
        return inputs + tf.reduce_mean(wide, axis=1, keepdims=True)


@pytest.mark.slow  # TensorFlow's allocator tries for ten seconds
def test_memory_that_really_runs_out_is_a_row(here, unestimated):
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), Huge(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(*batch(4), verbose=0)
    before = state(model)
    found = find(model, batch(8), largest=40)
    assert found.largest == 24
    assert [trial.outcome for trial in found.trials if trial.batch_size >= 32] == ["out of memory"]
    assert_same_state(before, state(model))


def test_memory_that_always_runs_out_leaves_no_size(here, unestimated, monkeypatch):
    model = net()
    before = state(model)
    failing(monkeypatch, 0, OOM)
    found = find(model, dataset(size=40), largest=100)
    assert (found.largest, found.recommended) == (0, 0)
    assert sizes(found) == [1, 2, 4, 8, 40]
    assert {trial.outcome for trial in found.trials} == {"out of memory"}
    assert str(found).startswith("No batch fits; the limit is batch size 1, where the trial ran out of memory.")
    assert_same_state(before[:2], state(model)[:2])
    with pytest.raises(ValueError, match="Expected a batch size that fits"):
        found.accumulation_steps(64)


@pytest.mark.parametrize("at", [1, 4])
def test_an_interruption_leaves_the_model_as_it_was(here, unestimated, monkeypatch, at):
    model = net()
    model.fit(*batch(16), verbose=0)
    before = state(model)
    failing(monkeypatch, at, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        find(model, dataset(), largest=32)
    assert_same_state(before, state(model))


@pytest.mark.slow
def test_an_interruption_while_a_trial_restores_the_model_is_made_good(here, unestimated, monkeypatch):
    class Interrupted(timers.StatePreserver):
        @contextlib.contextmanager
        def preserved(self):
            yield
            raise KeyboardInterrupt

    model = net()
    model.fit(*batch(16), verbose=0)
    before = state(model)
    monkeypatch.setattr(timers, "StatePreserver", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        find(model, dataset(), largest=16)
    assert_same_state(before, state(model))


@pytest.mark.slow
def test_a_step_that_always_fails_is_an_error(here, unestimated, monkeypatch):
    model = net()
    model.fit(*batch(16), verbose=0)
    before = state(model)
    failing(monkeypatch, 0, RuntimeError("the user's own"))
    with pytest.raises(TfoptError, match=r"Found: on 8 examples it fails: the user's own\. Try model\.fit"):
        find(model, dataset(), largest=16)
    assert_same_state(before, state(model))


def multi_input(structure):
    left, right = keras.Input((4,), name="left"), keras.Input((3,), name="right")
    joined = keras.layers.Concatenate()([left, right])
    outputs = {"a": keras.layers.Dense(1, name="a")(joined), "b": keras.layers.Dense(2, name="b")(joined)}
    model = keras.Model({"left": left, "right": right} if structure == "dict" else [left, right], outputs)
    model.compile("adam", {"a": "mse", "b": "mse"})
    arrays = np.ones((10, 4), "float32"), np.ones((10, 3), "float32")
    inputs = dict(zip(("left", "right"), arrays, strict=True)) if structure == "dict" else arrays
    targets = {"a": np.ones((10, 1), "float32"), "b": np.ones((10, 2), "float32")}
    return model, (inputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["dict", "tuple"])
def test_structures_of_inputs_and_outputs_are_kept(here, asked, structure):
    model, data = multi_input(structure)
    assert_found(find(model, tf.data.Dataset.from_tensor_slices(data).batch(4), largest=16), 16)
    assert {16} in asked


@pytest.mark.slow
def test_sample_weights_are_passed_on(here, asked):
    x, y = batch(16)
    assert_found(find(net(weighted_metrics=[]), (x, y, np.ones(16, "float32")), largest=16), 16)


def test_examples_are_those_of_the_data_and_repeat_if_too_few():
    model = net()
    x, y = batch(10)
    examples = searching.Examples(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    for size in (3, 4, 9, 25):
        found, labels = examples.batch(size)
        np.testing.assert_array_equal(found, x[np.arange(size) % 10])
        np.testing.assert_array_equal(labels, y[np.arange(size) % 10])


def shuffled_twice():
    data = tf.data.Dataset.range(12).cache().shuffle(12, seed=1).interleave(tf.data.Dataset.from_tensors)
    return data.map(lambda x: tf.py_function(lambda y: y + 1, [x], tf.int64)).shuffle(5, seed=2).batch(4).prefetch(1)


def copied_last():
    return shuffled_twice().apply(tf.data.experimental.copy_to_device("/CPU:0"))


def test_reading_examples_uses_up_no_order_of_a_shuffled_dataset():
    data, twin = shuffled_twice(), shuffled_twice()
    for _ in range(2):
        searching.Examples(small_net(), data).batch(9)
    for epoch in range(2):
        assert [each.numpy().tolist() for each in data] == [each.numpy().tolist() for each in twin], epoch
    first = searching.Examples(small_net(), shuffled_twice()).batch(12).tolist()
    assert first == [number for each in shuffled_twice() for number in each.numpy().tolist()]


def test_a_dataset_that_cannot_be_copied_is_read_itself():
    assert sorted(searching.Examples(small_net(), copied_last()).batch(12).tolist()) == [*range(1, 13)]


def test_a_part_that_is_no_list_of_examples_stays_as_it_is():
    data = tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.constant(0.5), tf.ones(7)))
    x, scalar, seven = searching.Examples(small_net(), data).batch(6)
    assert (x.shape, float(scalar), seven.shape) == ((6, 3), 0.5, (7,))


def test_batches_of_another_length_are_left_out():
    padded = [tf.zeros((2, 5)), tf.ones((2, 7)), 2 * tf.ones((2, 5))]
    data = tf.data.Dataset.from_generator(lambda: padded, output_signature=tf.TensorSpec((2, None)))
    assert searching.Examples(net(), data).batch(5)[:, 0].tolist() == [0, 0, 2, 2, 0]


def test_data_that_end_early_are_enough(here, unestimated):
    assert_found(find(net(), dataset(examples=3, size=8), largest=16), 16)


def exhausted():
    generator = iter([batch(4)])
    signature = (tf.TensorSpec((4, 8, 8, 1)), tf.TensorSpec((4,), tf.int32))
    data = tf.data.Dataset.from_generator(lambda: generator, output_signature=signature)
    assert len(list(data)) == 1
    return data


def unreadable():
    def fail(x, y):
        with tf.control_dependencies([tf.debugging.assert_equal(y, -1, message="bad file")]):
            return tf.identity(x), y

    return dataset().map(fail)


BAD_DATA = {
    "empty": (lambda: dataset().take(0), PipelineError, "at least one batch"),
    "exhausted": (exhausted, PipelineError, "a generator yields only once"),
    "no examples": (lambda: batch(0), PipelineError, "at least one example"),
    "unreadable": (unreadable, PipelineError, "Found: .*bad file"),
    "unbatched": (lambda: tf.data.Dataset.from_tensors(3.0), UnsupportedError, "first axis is the batch"),
    "ragged": (
        lambda: tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [2.0, 3.0]])),
        UnsupportedError,
        "Expected dense tensors .* RaggedTensor",
    ),
    "a list": (lambda: [1, 2], TypeError, "Expected a tf.data.Dataset"),
    "another shape": (
        lambda: (np.ones((4, 7, 7, 2), "float32"), np.ones(4)),
        ValueError,
        "that 'net' can train on",
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_data_that_cannot_be_used_are_refused(here, case):
    make, error, words = BAD_DATA[case]
    model = net()
    before = state(model)
    with pytest.raises(error, match=words):
        find(model, make(), largest=16)
    assert_same_state(before[:2], state(model)[:2])


BAD_ARGUMENTS = [
    ({"goal": "memory"}, ValueError, "Expected a goal: 'throughput'. Received: 'memory'"),
    ({"largest": 0}, ValueError, "Expected largest to be an integer of at least 1"),
    ({"largest": 2.5}, ValueError, "Expected largest to be an integer"),
    ({"limit_mib": 0}, ValueError, "Expected limit_mib to be above 0"),
    ({"limit_mib": "8 GB"}, TypeError, "Expected limit_mib to be a number"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), BAD_ARGUMENTS)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        find(net(), dataset(), **arguments)


def test_a_model_must_be_compiled():
    with pytest.raises(ValueError, match="Expected a compiled model"):
        find(net(compiled=False), dataset())
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        find("model", dataset())


def test_several_replicas_are_refused_by_name(monkeypatch):
    model = net()
    strategy = type("Strategy", (), {"num_replicas_in_sync": 2})
    monkeypatch.setattr(type(model), "distribute_strategy", property(lambda self: strategy), raising=False)
    with pytest.raises(UnsupportedError, match=r"trains on 2 replicas\. Build it outside the strategy's scope"):
        find(model, dataset())


def fixed_net(in_input):
    layers = [keras.layers.Flatten(), keras.layers.Dense(4)]
    if in_input:
        model = keras.Sequential([keras.Input(batch_shape=(16, 8, 8, 1)), *layers])
    else:  # of a reshape, which only shows when another size is tried
        shape = keras.layers.Lambda(lambda x: keras.ops.reshape(x, (16, 64)), output_shape=(64,))
        model = keras.Sequential([keras.Input((8, 8, 1)), shape, *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fixed_data():
    x, y = batch(64)
    return tf.data.Dataset.from_tensor_slices((x, y % 4)).batch(16)


@pytest.mark.slow
def test_a_size_fixed_in_the_input_is_the_only_one_tried(here):
    model = fixed_net(in_input=True)
    found = find(model, fixed_data())
    assert (sizes(found), found.largest, found.recommended) == ([16], 16, 16)
    assert "the limit is the model's Input, which takes batches of 16 only." in " ".join(str(found).split())
    known = searching.limits(model, searching.Examples(model, fixed_data()), None, None).known_mib
    none = find(model, fixed_data(), limit_mib=known[16] * 0.999)
    assert none.trials == ()
    assert "and a batch of 16 is estimated" in none.bounded_by
    with pytest.raises(ValueError, match="Expected largest to be at least 16, the batch size in the Input"):
        find(model, fixed_data(), largest=8)


@pytest.mark.slow
def test_a_size_fixed_inside_the_model_is_found(here):
    found = find(fixed_net(in_input=False), fixed_data())
    assert (found.largest, found.recommended) == (16, 16)
    assert {trial.outcome for trial in found.trials if trial.batch_size != 16} == {"failed"}
    assert "a batch of 16 is" in find(fixed_net(in_input=False), fixed_data(), limit_mib=0.001).bounded_by


@pytest.mark.slow
def test_a_model_that_runs_eagerly_has_no_estimate(here):
    model = net(run_eagerly=True)
    found = find(model, dataset(), largest=16)
    assert_found(found, 16)
    assert {trial.estimated_mib for trial in found.trials} == {None}
    with pytest.raises(UnsupportedError, match="run_eagerly"):
        find(model, dataset(), limit_mib=100)


@pytest.mark.slow
@pytest.mark.no_gpu
def test_without_an_estimate_no_larger_batch_is_risked_in_this_process(here):
    found = find(net(run_eagerly=True), dataset(size=24))
    assert found.largest == 24
    assert "it might end this process" in found.bounded_by


@pytest.mark.slow
def test_a_limit_bounds_the_search_by_the_estimate(here):
    model = net()
    images, labels = batch(64)
    limit = searching.limits(model, searching.Examples(model, (images, labels)), None, None).known_mib[64]
    found = find(model, (images, labels), limit_mib=limit * 1.0001)
    assert 64 <= found.largest <= 72
    assert max(trial.estimated_mib for trial in found.trials) <= limit * 1.13
    assert "limit_mib=" in found.bounded_by
    assert find(model, (images, labels), limit_mib=limit * 1.0001, largest=24).bounded_by == "largest=24"
    none = find(model, (images, labels), limit_mib=0.001)
    assert (none.trials, none.largest) == ((), 0)
    smallest = memory.estimate(model, (images[:1], labels[:1])).total_mib
    assert " ".join(str(none).split()).startswith(
        f"No batch fits; the limit is limit_mib=0.001, and a batch of 1 is estimated to take {smallest:.3g} MiB. Allow "
        "or free more memory, or let a step take less: tfopt.memory.recompute(model), or a smaller model."
    )


def test_an_unbuilt_model_and_one_with_its_own_step_are_searched(here):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.optimizer_of_its_own = keras.optimizers.SGD()

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data) ** 2)
            self.optimizer_of_its_own.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    model = Own()
    model.compile()
    data = tf.data.Dataset.from_tensors(tf.ones((4, 3)))
    assert_found(find(model, data, largest=16), 16)
    before = state(model)
    assert_found(find(model, data, largest=16), 16)
    assert_same_state(before, state(model))


def example_search():
    def trial(size, ms, estimated):
        times = ms and StepTimes(
            repeats_ms=((ms, ms),), steps_per_sample=1, first_step_seconds=1.0, examples_per_step=size
        )
        outcome = "fits" if ms else "out of memory"
        return Trial(
            batch_size=size, outcome=outcome, reason="" if ms else "OOM <here>", times=times, estimated_mib=estimated
        )

    trials = (trial(8, 4.0, 10.0), trial(16, 4.0, 20.0), trial(32, 7.8, 40.0), trial(64, None, 80.0))
    return BatchSearch(
        largest=32, recommended=32, trials=trials, bounded_by="batch size 64", in_this_process="of a reason"
    )


def test_the_text_is_a_table_and_says_what_changes():
    text = str(example_search())
    assert [line.split() for line in text.splitlines() if line.startswith("  ")] == [
        ["batch", "ms", "a", "step", "examples/s", "estimated", "MiB"],
        ["8", "4", "2,000", "10", "fits"],
        ["16", "4", "4,000", "20", "fits"],
        ["32", "7.8", "4,103", "40", "recommended,", "largest"],
        ["64", "–", "–", "80", "out", "of", "memory"],
    ]
    said = " ".join(text.split())
    assert said.startswith("Batch size 32: 4,103 examples/s, the fastest. The largest found to fit is 32; the limit is")
    assert "fewer updates per epoch. The learning rate is untouched and may need tuning." in said
    assert "64: out of memory: OOM <here>." in said
    assert said.endswith("Trials ran in this process: of a reason.")
    assert max(map(len, text.splitlines())) <= 80
    assert repr(example_search()).startswith("<BatchSearch: Batch size 32")


def test_the_dictionary_is_json():
    found = json.loads(json.dumps(example_search().to_dict()))
    assert (found["largest"], found["recommended"], found["bounded_by"]) == (32, 32, "batch size 64")
    assert [trial["examples_per_second"] for trial in found["trials"]][:2] == [2000.0, 4000.0]
    assert StepTimes.from_dict(found["trials"][0]["times"]).median_ms == 4.0
    assert found["trials"][3]["times"] is None


def test_the_page_shows_both_curves_and_the_reasons(tmp_path):
    page = example_search().to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Throughput" in page
    assert "Memory of a step" in page
    assert "Peak on the GPU" not in page  # nothing is known of it
    assert "OOM &lt;here&gt;" in page
    assert "fewer updates per epoch" in page


def test_accumulation_steps_count_recommended_batches():
    found = example_search()
    assert [found.accumulation_steps(size) for size in (32, 64, 320)] == [1, 2, 10]
    with pytest.raises(ValueError, match=r"multiple of 32.*Received: 100. Pass 96 or 128\."):
        found.accumulation_steps(100)
    with pytest.raises(ValueError, match=r"Pass 32\."):
        found.accumulation_steps(20)
    with pytest.raises(ValueError, match="Expected effective to be an integer"):
        found.accumulation_steps(0)
