"""Several steps in one launch train as stock `fit` does, step by step, and callbacks hear of each."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf
from fitting import Pair, Trace, X, Y, compiled, dataset, dense_net
from kinds import KINDS
from quick import first_quick

from tfopt import fit, xla
from tfopt.callbacks import StepProfiler, ThroughputLogger, TrainingCheckpoint
from tfopt.errors import UnsupportedError
from tfopt.fit import many_steps, overlapping
from tfopt.fit.launching import overlap_of, steps_ahead
from tfopt.pipelines import build_pipeline, per_batch
from tfopt.pipelines.device.copying import copy_ahead
from tfopt.pipelines.device.device_stage import stage_of

ONCE = {"verbose": 0, "shuffle": False}
STEPS = 3  # of 8, the last of which has another shape: two launches, and two steps alone


@pytest.fixture
def launches(monkeypatch):
    """The number of steps of each launch."""
    found = []
    launched, alone = many_steps._Program.launched, many_steps.ManySteps._run

    def several(program, batches):
        found.append(len(batches))
        return launched(program, batches)

    def one(step, batch):
        found.append(1)
        return alone(step, batch)

    monkeypatch.setattr(many_steps._Program, "launched", several)
    monkeypatch.setattr(many_steps.ManySteps, "_run", one)
    return found


@pytest.fixture(scope="module")
def pair():
    return Pair(steps_per_launch=STEPS)


def trained(model, epochs=2, callbacks=(), **arguments):
    trace = Trace()
    given = {"x": dataset(batch=5)} | ONCE | arguments
    history = model.fit(**given, epochs=epochs, callbacks=[trace, *callbacks])
    return history.history, history.epoch, trace.calls


def test_callbacks_hear_of_each_step(pair, launches):
    results = pair.train(trained)
    assert [batch for name, batch, *_ in results[2] if name == "end"] == [*range(8)] * 2
    assert launches == [3, 3, 1, 1] * 2


@pytest.mark.parametrize("jit", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize(("make", "arguments"), first_quick(KINDS.values(), 3), ids=KINDS)
def test_every_kind_of_training(launches, make, arguments, jit):
    def train(model):
        model.jit_compile = jit and all(layer.supports_jit for layer in model.layers)
        return trained(model, 3, **arguments())

    Pair(make, steps_per_launch=STEPS).train(train)
    assert 3 in launches


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras says
def test_data_of_unknown_length(launches):
    """Stock `fit` counts a step too many there: the truth is data whose length is known."""
    pair = Pair(steps_per_launch=STEPS)

    def train(model):
        data = dataset(batch=5).filter(lambda *_: True) if model is pair.overlapped else dataset(batch=5)
        *history, calls = trained(model, 3, x=data)
        return history, [call for call in calls if call[0] != "begin"]  # Keras begins a step, and finds no data

    pair.train(train)
    assert launches == [3, 3, 1, 1] * 3


class Noting(keras.callbacks.Callback):
    """Notes on each step how far ahead the weights are, and the optimizer's count of steps."""

    def __init__(self, acts_every=None):
        super().__init__()
        self.seen = []
        if acts_every is not None:
            self.acts_every = acts_every

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((steps_ahead(self.model), int(self.model.optimizer.iterations)))


def test_a_callback_that_may_act_makes_it_one_step(pair, launches, caplog):
    pair.train(lambda model: trained(model, callbacks=[Noting()]))
    assert set(launches) == {1}
    (record,) = [record for record in caplog.records if "Noting" in record.message]
    assert record.message.startswith("Expected to launch several steps at once. Found Noting.on_train_batch_end, which")


@pytest.mark.parametrize(
    ("every", "expected"),
    [(0, [3, 3, 1, 1]), (1, [1] * 8), (2, [1] * 8), (3, [3, 3, 1, 1]), (4, [3, 1, 3, 1]), (5, [3, 1, 1, 3])],
)
def test_a_callback_that_says_when_it_acts(pair, launches, every, expected):
    noting = Noting(every)
    pair.overlapped.fit(dataset(batch=5), callbacks=[noting], **ONCE)
    assert launches == expected
    acts = [seen for batch, seen in enumerate(noting.seen) if every and (batch + 1) % every == 0]
    assert all(ahead == 0 for ahead, _ in acts)


@pytest.mark.parametrize("every", [-1, 2.5, "2", True])
def test_acts_every_is_a_number_of_batches(pair, every):
    with pytest.raises((TypeError, ValueError), match=r"Noting\.acts_every"):
        pair.overlapped.fit(dataset(batch=5), callbacks=[Noting(every)], **ONCE)


@pytest.mark.filterwarnings("ignore:Expected callbacks that leave a step's logs unread")
@pytest.mark.parametrize(
    ("make", "launched"),
    [
        (keras.callbacks.TerminateOnNaN, False),
        (lambda: keras.callbacks.LambdaCallback(on_epoch_end=print), True),
        (lambda: keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None), False),
        (lambda: keras.callbacks.ModelCheckpoint("{epoch}.keras"), True),
        (lambda: keras.callbacks.ModelCheckpoint("{epoch}.keras", save_freq=2), False),
        (lambda: keras.callbacks.BackupAndRestore("backup"), True),
        (lambda: keras.callbacks.BackupAndRestore("backup", save_freq=2), False),
        (lambda: keras.callbacks.EarlyStopping("loss"), True),
        (lambda: keras.callbacks.CSVLogger("log.csv"), True),
        (lambda: keras.callbacks.SwapEMAWeights(), True),
        (lambda: ThroughputLogger(), True),
        (lambda: TrainingCheckpoint("checkpoints"), True),
    ],
)
def test_which_callbacks_allow_it(launches, tmp_path, monkeypatch, make, launched):
    monkeypatch.chdir(tmp_path)
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    model = fit.overlap(dense_net(optimizer=optimizer), steps_per_launch=STEPS)
    model.fit(dataset(batch=5), callbacks=[make()], **ONCE)
    assert (3 in launches) == launched


class Stop(keras.callbacks.Callback):
    """Asks for a stop on a step."""

    acts_every = 0

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.model.stop_training or batch == 3


def test_a_subclass_of_one_that_says_so_has_to_say_it_itself(launches):
    class Slower(ThroughputLogger):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            self.model.optimizer.learning_rate = 0.9 * float(self.model.optimizer.learning_rate)

    model = fit.overlap(dense_net(), steps_per_launch=STEPS)
    model.fit(dataset(batch=5), callbacks=[Slower()], **ONCE)
    assert set(launches) == {1}
    Slower.acts_every = 3
    model.fit(dataset(batch=5), callbacks=[Slower()], **ONCE)
    assert 3 in launches


def test_batches_whose_shapes_change_are_named_and_hold_nothing_up(launches, caplog):
    """Callbacks can act at least as often as a launch is long."""
    words = tf.ragged.constant([[1] * (7 - 2 * (at % 2)) for at in range(20)])
    data = tf.data.Dataset.from_tensor_slices(words).map(lambda row: (row[None], tf.constant([0]))).repeat(3)
    model = keras.Sequential(
        [keras.layers.Embedding(4, 2), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(4)]
    )
    noting = Noting(0)
    fit.overlap(compiled(model), steps_per_launch=4).fit(data, callbacks=[noting], **ONCE)
    ahead = [ahead for ahead, _ in noting.seen]
    assert set(launches) == {1}
    assert all(0 in ahead[at : at + 4] for at in range(57))
    assert "batches whose shapes change" in caplog.text


def test_draws_whose_state_is_a_kernels_are_named_and_launched_alone(launches, caplog):
    class Noise(keras.layers.Layer):
        def call(self, inputs):
            return inputs + tf.random.normal(tf.shape(inputs))

    Pair(lambda: compiled(keras.Sequential([keras.Input((8,)), Noise(), keras.layers.Dense(4)])), STEPS).train(trained)
    assert set(launches) == {1}
    assert "draws from a state of its own" in caplog.text


def test_a_train_function_of_ones_own_is_called_for_each_step(launches):
    model = fit.overlap(dense_net(), steps_per_launch=STEPS)
    model.make_train_function()
    inner = model.train_function
    model.train_function = lambda iterator: inner(iterator)
    model.fit(dataset(batch=5), **ONCE)
    assert set(launches) == {1}


@pytest.mark.parametrize("act", [fit.undo, fit.overlap, lambda model: model.fit(dataset(batch=5), **ONCE)])
def test_within_a_launch_a_model_is_not_taken_away(act):
    class Acts(Noting):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                act(self.model)

    model = fit.overlap(dense_net(), steps_per_launch=STEPS)
    with pytest.raises(UnsupportedError, match="Expected"):
        model.fit(dataset(batch=5), callbacks=[Acts(0)], **ONCE)
    model.fit(dataset(batch=5), **ONCE)
    assert steps_ahead(model) == 0


class Interrupted(keras.callbacks.Callback):
    """Asks for a stop within a launch, and is interrupted before the launch ends."""

    acts_every = 0

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt
        self.model.stop_training = True


@pytest.mark.parametrize("after", [lambda model: None, fit.overlap, lambda model: model.evaluate(X, Y, verbose=0)])
def test_a_stop_does_not_outlive_a_training_that_was_interrupted(after):
    model = fit.overlap(dense_net(), steps_per_launch=STEPS)
    with pytest.raises(KeyboardInterrupt):
        model.fit(dataset(batch=5), callbacks=[Interrupted()], **ONCE)
    assert steps_ahead(model) == 0
    after(model)
    before = int(model.optimizer.iterations)
    model.fit(dataset(batch=5), epochs=2, **ONCE)
    assert int(model.optimizer.iterations) - before == 16


def test_a_stop_within_a_launch_is_saved_and_continued(tmp_path):
    class StopAt(Stop):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.model.stop_training or batch == 0

        acts_every = 0

    def fitted(*callbacks):
        model = fit.overlap(dense_net(), steps_per_launch=STEPS)
        model.fit(dataset(batch=5), epochs=2, callbacks=[TrainingCheckpoint(tmp_path), *callbacks], **ONCE)
        return int(model.optimizer.iterations)

    assert fitted(StopAt()) == 3
    assert fitted() == 16


def test_an_interrupted_launch_leaves_no_wrong_count_of_good_steps(monkeypatch):
    labels = Y.copy()
    labels[5 * 4 + 2] = 99  # the second step of the second launch
    model = fit.overlap(checked_labels(), steps_per_launch=STEPS)
    model.fit(dataset(batch=5), **ONCE)
    (program,) = next(iter(model.train_function._programs.values())).values()
    launch = program._launch

    def interrupted(leaves):
        launch(leaves)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(dataset(batch=5), **ONCE)
    monkeypatch.setattr(program, "_launch", launch)
    calls, _ = failing(dataset(y=labels, batch=5))(model)
    assert [batch for name, batch, *_ in calls if name == "end"] == [*range(4)]


def test_a_stop_within_a_launch_comes_at_its_end(pair):
    trace = Trace()
    model = pair.overlapped
    before = int(model.optimizer.iterations)
    model.fit(dataset(batch=5), epochs=4, callbacks=[Stop(), trace], **ONCE)
    assert [batch for name, batch, *_ in trace.calls if name == "end"] == [*range(6)]
    assert int(model.optimizer.iterations) - before == 6
    model.fit(dataset(batch=5), **ONCE)  # and does not reach into the next one
    assert int(model.optimizer.iterations) - before == 6 + 8


def checked_labels():
    """A net whose step fails for a label of which the loss has no class."""

    class Checked(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            with tf.control_dependencies([tf.debugging.assert_less(y, tf.cast(4, y.dtype), "out of range")]):
                return super().compute_loss(x, tf.identity(y), y_pred, sample_weight, training)

    return compiled(Checked([keras.Input((8,)), keras.layers.Dense(4)]))


def failing(bad):
    """A function of a model that fits it on data of which batch `bad` fails, or makes its step fail."""

    def train(model):
        trace = Trace()
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"too large|out of range"):
            model.fit(bad, callbacks=[trace], **ONCE)
        return trace.calls, int(model.optimizer.iterations)

    return train


@pytest.mark.parametrize("at", [0, 1, 4, 5, 7])
def test_data_that_fail_at_a_step(at):
    def checked(number, batch):
        with tf.control_dependencies([tf.debugging.assert_less(number, tf.cast(at, tf.int64), "too large")]):
            return tf.nest.map_structure(tf.identity, batch)

    # Beside overlapped steps: with stock `fit`, a part of the step runs all the same.
    pair = Pair(steps_per_launch=STEPS, beside=fit.overlap)
    calls, _ = pair.train(failing(dataset(batch=5).enumerate().map(checked)))
    assert [batch for name, batch, *_ in calls if name == "end"] == [*range(at)]


@pytest.mark.parametrize("at", [0, 1, 5, 7])
def test_a_step_that_fails_in_a_launch(at):
    """A label of which the loss has no class: the steps before it count, and their hooks are called."""
    labels = Y.copy()
    labels[5 * at + 2] = 99

    pair = Pair(checked_labels, steps_per_launch=STEPS)
    calls, _ = pair.train(failing(dataset(y=labels, batch=5)))
    assert [batch for name, batch, *_ in calls if name == "end"] == [*range(at)]


def test_evaluate_predict_and_single_batches_in_between(pair):
    def train(model):
        found = [trained(model)]
        found.append(model.evaluate(dataset(batch=5), verbose=0))
        found.append(model.predict(X[:7], verbose=0).tobytes())
        found.append(model.train_on_batch(X[:5], Y[:5]))
        return [*found, trained(model, x=dataset(batch=7))]

    pair.train(train)


def test_what_runs_eagerly_or_logs_no_numbers_is_launched_step_by_step(launches, caplog):
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data) | {"shape": tf.shape(data[0])}

    for make, found in (
        (lambda: dense_net(run_eagerly=True), "eager steps"),
        (lambda: dense_net(steps_per_execution=2), "steps_per_execution=2"),
        (lambda: compiled(Own([keras.Input((8,)), keras.layers.Dense(4)])), "a train_step whose logs are not numbers"),
    ):
        caplog.clear()
        fit.overlap(make(), steps_per_launch=STEPS).fit(dataset(batch=5), **ONCE)
        assert found in caplog.text
    assert 3 not in launches


def test_under_a_strategy_it_is_refused():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = dense_net()
    with pytest.raises(UnsupportedError, match="steps_per_launch=1"):
        fit.overlap(model, steps_per_launch=STEPS)
    fit.overlap(model)


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True, None])
def test_steps_per_launch_is_a_number_or_auto(value):
    with pytest.raises((TypeError, ValueError), match="steps_per_launch"):
        fit.overlap(dense_net(), steps_per_launch=value)


def test_on_and_off(launches):
    model = fit.overlap(dense_net())
    model.fit(dataset(batch=5), **ONCE)
    assert not isinstance(model.train_function, many_steps.ManySteps)
    fit.overlap(model, steps_per_launch=STEPS).fit(dataset(batch=5), **ONCE)
    assert launches == [3, 3, 1, 1]
    fit.overlap(model).fit(dataset(batch=5), **ONCE)
    fit.undo(model)
    model.fit(dataset(batch=5), **ONCE)
    assert launches == [3, 3, 1, 1]
    assert overlap_of(model) is None


def test_a_watch_counts_what_is_compiled_for_launches():
    model = fit.overlap(dense_net(jit_compile=True), steps_per_launch=2)
    with xla.watch() as compilations:
        model.fit(dataset(batch=7), epochs=2, **ONCE)
    assert compilations.count == 2  # of the last batch, too


def staged(**options):
    return build_pipeline((X, Y), batch_size=5, cache="device", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"seed": 3},
        {"seed": 3, "augment": per_batch(lambda x, y, seed: (x + tf.random.stateless_normal(tf.shape(x), seed), y))},
        {"seed": 3, "remainder": "drop"},
    ],
    ids=["in order", "shuffled", "augmented", "whole batches"],
)
def test_batches_of_a_device_stage_are_made_in_the_launch(launches, options):
    pair = Pair(steps_per_launch=STEPS, beside=fit.overlap)
    pair.train(lambda model: trained(model, x=staged(**options)))
    assert launches == [3, 3, 1, 1] * 2


def test_batches_whose_integers_stay_on_the_host(launches, monkeypatch):
    """As on a GPU; here with inputs by name, of which some are integers."""
    monkeypatch.setattr(overlapping, "is_gpu", lambda device: True)

    def make():
        inputs = {"a": keras.Input((8,), name="a"), "b": keras.Input((8,), dtype="int32", name="b")}
        joined = keras.layers.Concatenate()([inputs["a"], keras.ops.cast(inputs["b"], "float32")])
        return compiled(keras.Model(inputs, keras.layers.Dense(4)(joined)))

    given = {"a": X, "b": (3 * X).astype("int32")}, Y.astype("int32")
    pair = Pair(make, steps_per_launch=STEPS)

    def train(model):
        data = tf.data.Dataset.from_tensor_slices(given).batch(5)
        return trained(model, x=copy_ahead(data, "/cpu:0", None) if model is pair.overlapped else data)

    pair.train(train)
    assert launches == [3, 3, 1, 1] * 2


@pytest.mark.parametrize("jit", [False, True])
def test_examples_on_the_device_are_freed_with_their_dataset(jit):
    model = fit.overlap(dense_net(jit_compile=jit), steps_per_launch=STEPS)
    data = staged(seed=3)
    model.fit(data, **ONCE)
    rows = weakref.ref(stage_of(data).load()[0])
    del data
    gc.collect()
    assert rows() is None


def test_the_throughput_is_that_of_whole_launches():
    """Of the hooks of a launch all but the first come at once: times of single steps would be none."""
    model, logger = fit.overlap(dense_net(), steps_per_launch=8), ThroughputLogger()
    data = dataset(batch=5).repeat(10)
    model.fit(data, **ONCE)
    logs = model.fit(data, callbacks=[logger], **ONCE).history
    assert logs["step_time_p99_ms"][0] < 8 * logs["step_time_ms"][0]
    assert min(logger.step_times.percentiles(1)) > 0.1 * logs["step_time_ms"][0] / 1000
    assert "input_wait_percent" not in logs


def test_a_profiled_step_is_launched_alone(launches, tmp_path):
    model, profiler = fit.overlap(dense_net(), steps_per_launch=STEPS), StepProfiler(tmp_path, start_step=1, steps=2)
    model.fit(dataset(batch=5).repeat(2), callbacks=[profiler], **ONCE)
    assert len(profiler.traces) == 1
    assert launches == [3, 1, 1, *[3] * 3, 1, 1]  # the trace begins with the second launch
