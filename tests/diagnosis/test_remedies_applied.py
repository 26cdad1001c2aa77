"""Scripts as users write them: a remedy that is printed for one is put into it to the letter, and trains the same."""

import functools
import inspect
import itertools
from collections import Counter
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from remedied import remedied

import tfopt
from tfopt.diagnosis import remedies
from tfopt.diagnosis.training import _as_fit_iterates
from tfopt.internals.training import train_validation_split
from tfopt.model.batches import as_dataset

pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # as each fit of a dataset is

ROWS, BATCH, EPOCHS = 36, 8, 3  # the last batch is smaller
Y = np.arange(ROWS, dtype="float32")[:, None]
X = np.repeat(Y, 4, axis=1) / 10


class World:
    """What a script finds, and what happened in it."""

    def __init__(self, folder=None, fits=False):
        self.seen, self.decoded, self.own, self.saved = [], Counter(), [], []
        self.folder, self.fits = folder, fits
        self.model, self.asked = None, None

    def made(self, shape=(4,)):
        """A model that trains, or only reads what it would train on."""
        if not self.fits:
            return SimpleNamespace(fit=self.read, steps_per_execution=1)
        keras.utils.set_random_seed(1)
        self.model = keras.Sequential([keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(1)])
        self.model.compile(keras.optimizers.SGD(1e-4), "mse")
        return self.model

    def read(self, *args, **given):
        """Reads the data as `fit` does in each epoch."""
        bound = inspect.signature(keras.Model.fit).bind(None, *args, **given)
        bound.apply_defaults()
        self.asked = asked = bound.arguments
        x, y, weights = asked["x"], asked["y"], asked["sample_weight"]
        if asked["validation_split"]:
            (x, y, weights), _ = train_validation_split((x, y, weights), asked["validation_split"])
        data, _ = _as_fit_iterates(x, y, weights, asked)
        going_on = iter(data)
        for _ in range(asked["epochs"]):
            epoch = iter(data) if asked["steps_per_epoch"] is None else going_on
            self.seen.append([batch[0].numpy() for batch in itertools.islice(epoch, asked["steps_per_epoch"])])

    def decode(self, x, *y):
        def count(row):
            self.decoded["rows"] += len(row) if row.shape == (len(row), 4) or row.ndim > 3 else 1
            return row

        counted = tf.numpy_function(count, [x], tf.float32)
        return tf.ensure_shape(counted, x.shape), *y

    def augment(self, x, y):
        return x + 0.0 * tf.random.uniform(tf.shape(x)), y

    def run(self, script):
        """Runs the script, and returns this."""
        np.random.seed(0)
        names = {"x": X, "y": Y, "sample_weight": np.ones(ROWS, "float32"), "folder": self.folder, "made": self.made}
        names |= {"decode": self.decode, "augment": self.augment, "world": self, "keras": keras, "tf": tf, "np": np}
        exec(compile(script, "script", "exec"), names)
        return self

    @property
    def rows(self):
        """The rows of each epoch, each with how often it was there."""
        return [Counter(row.tobytes() for batch in epoch for row in batch) for epoch in self.seen]

    @property
    def sizes(self):
        return [[len(batch) for batch in epoch] for epoch in self.seen]

    @property
    def orders(self):
        """The order of the rows in each epoch, if it is another one."""
        return {b"".join(batch.tobytes() for batch in epoch) for epoch in self.seen}


@functools.cache
def as_it_is(script, folder=None):
    """What happens in a script."""
    return World(folder).run(script)


def training(script, folder=None, **more):
    """The training that a script runs."""
    world = as_it_is(script, folder)
    asked = world.asked
    return SimpleNamespace(
        data=asked["x"],
        arrays=(asked["x"], asked["y"], asked["sample_weight"]),
        examples=max(max(world.sizes)),
        shuffled=asked["shuffle"],
        validation_split=asked["validation_split"],
        callbacks=asked["callbacks"] or [],
        epochs=asked["epochs"],
        epochs_per_validation=1,
        steps_given=asked["steps_per_epoch"],
        steps_per_epoch=len(world.seen[0]),
        model=SimpleNamespace(steps_per_execution=1),
    )


def dataset(*stages, source="tf.data.Dataset.from_tensor_slices((x, y))", fit="", shape="", before=""):
    calls = "".join(f"dataset = dataset{stage}\n" for stage in stages)
    return f"{before}dataset = {source}\n{calls}model = made({shape})\nmodel.fit(dataset, epochs=3, verbose=0{fit})\n"


IMAGES = "keras.utils.image_dataset_from_directory(folder, image_size=(4, 4), batch_size=8, verbose=False)"
GENERATOR = "tf.data.Dataset.from_generator(rows, output_signature=(tf.TensorSpec((4,)), tf.TensorSpec((1,))))"
ROWS_OF = "def rows():\n    for i in range(36):\n        world.decoded['rows'] += 1\n        yield x[i], y[i]\n"
ROWS_KNOWN = ".apply(tf.data.experimental.assert_cardinality(36))"
TF_DATA = {
    "map, shuffle, batch": dataset(".map(decode)", ".shuffle(36)", ".batch(8)"),
    "map, shuffle less, batch": dataset(".map(decode)", ".shuffle(8)", ".batch(8)", ".prefetch(2)"),
    "shuffle, map, batch": dataset(".shuffle(36)", ".map(decode)", ".batch(8)"),
    "in parallel": dataset(".shuffle(36)", ".map(decode, num_parallel_calls=2)", ".batch(8)", ".prefetch(-1)"),
    "shuffle, batch, map": dataset(".shuffle(36)", ".batch(8)", ".map(decode)", ".prefetch(2)"),
    "batch, map": dataset(".batch(8)", ".map(decode)"),
    "map, augment": dataset(".shuffle(36)", ".map(decode)", ".map(augment)", ".batch(8)"),
    "in order": dataset(".map(decode)", ".batch(8)"),
    "take": dataset(".map(decode)", ".take(30)", ".shuffle(30)", ".batch(8)"),
    "cache before map": dataset(".cache()", ".map(decode)", ".shuffle(36)", ".batch(8)"),
    "chained": (
        "dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(decode).shuffle(36).batch(8)\n"
        "model = made()\nmodel.fit(dataset, epochs=3, verbose=0)\n"
    ),
    "generator": dataset(ROWS_KNOWN, ".shuffle(36)", ".batch(8)", source=GENERATOR, before=ROWS_OF),
}
LOADERS = {
    "loader": dataset(source=IMAGES, shape="(4, 4, 3)"),
    "loader, augment": dataset(".map(augment)", ".prefetch(2)", source=IMAGES, shape="(4, 4, 3)"),
    "loader, map": dataset(".map(decode)", source=IMAGES, shape="(4, 4, 3)"),
}
CACHED = {
    "map, cache, shuffle, batch": dataset(".map(decode)", ".cache()", ".shuffle(36)", ".batch(8)"),
    "map, cache, augment": dataset(".map(decode)", ".cache()", ".shuffle(36)", ".map(augment)", ".batch(8)"),
    "batch, map, cache": dataset(".shuffle(36)", ".batch(8)", ".map(decode)", ".cache()"),
    "augment alone": dataset(".shuffle(36)", ".map(augment)", ".batch(8)"),
    "nothing to cache": dataset(".shuffle(36)", ".batch(8)"),
}
BATCHES_OF = """
class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        return x[8 * number : 8 * number + 8], y[8 * number : 8 * number + 8]

dataset = Batches()
model = made()
model.fit(dataset, epochs=3, verbose=0, shuffle=False)
"""
PLAN = """
from tfopt.pipelines import build_pipeline, per_batch
dataset = build_pipeline((x, y), transform=per_batch(decode), batch_size=8, seed=1, cache=None)
model = made()
model.fit(dataset, epochs=3, verbose=0)
"""
ENDLESS = """
def batches():
    while True:
        for i in range(0, 36, 8):
            yield x[i : i + 8], y[i : i + 8]

model = made()
model.fit(batches(), steps_per_epoch=5, epochs=3, verbose=0)
"""
ARRAYS = {
    "arrays": "model = made()\nmodel.fit(x, y, batch_size=8, epochs=3, verbose=0)",
    "in order": "model = made()\nmodel.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)",
    "weights": "model = made()\nmodel.fit(x, y, sample_weight=sample_weight, batch_size=8, epochs=3, verbose=0)",
    "split": "model = made()\nmodel.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_split=0.25)",
}
ALL = TF_DATA | LOADERS | CACHED
OTHERS = {"PyDataset": BATCHES_OF, "plan": PLAN, "endless": ENDLESS} | {
    f"NumPy, {name}": ARRAYS[name] for name in ARRAYS
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images, each of one brightness."""
    made = tmp_path_factory.mktemp("images")
    for number in range(ROWS):
        (made / "ab"[number % 2]).mkdir(exist_ok=True)
        picture = np.full((4, 4, 3), 3 * number, "uint8")
        (made / "ab"[number % 2] / f"{number}.png").write_bytes(tf.io.encode_png(picture).numpy())
    return str(made)


def same_epochs(before, after):
    """Each epoch has the rows it had, in batches of the same sizes; without a seed, a plan's come as they are ready."""
    assert [*map(sorted, after.sizes)] == [*map(sorted, before.sizes)]
    assert after.rows == before.rows


@pytest.mark.parametrize("name", TF_DATA | LOADERS)
def test_a_cache_changes_nothing_but_how_often_the_data_are_computed(name, folder):
    script = ALL[name]
    remedy = remedies.slow_input(training(script, folder))
    assert ".cache()" in remedy, remedy
    before, after = as_it_is(script, folder), World(folder).run(remedied(script, remedy))
    same_epochs(before, after)
    assert len(after.orders) == len(before.orders)
    if before.decoded:
        assert 1 < before.decoded["rows"] / after.decoded["rows"] <= EPOCHS
    if len(before.orders) == 1:  # without a shuffle everything is as it was
        assert after.orders == before.orders


@pytest.mark.parametrize("name", CACHED)
def test_no_line_where_a_cache_would_change_something_or_gain_nothing(name):
    remedy = remedies.slow_input(training(CACHED[name]))
    assert remedy.startswith(remedies.NO_LINE)
    assert remedies.only_said(remedy)


@pytest.mark.parametrize("name", ALL)
def test_data_opened_once_give_the_same_epochs(name, folder):
    script = ALL[name]
    remedy = remedies.repeated(training(script, folder))
    same_epochs(as_it_is(script, folder), World(folder).run(remedied(script, remedy)))


@pytest.mark.parametrize("name", ALL)
def test_epochs_that_start_slowly_get_the_line_for_what_fills_the_buffer(name, folder):
    found = training(ALL[name], folder)
    lines, why = remedies.opened_each_epoch(found)
    fills = name in (
        "map, shuffle, batch",
        "map, shuffle less, batch",
        "take",
        "cache before map",
        "chained",
        "generator",
    )
    assert (lines == remedies.slow_input(found)) == fills == bool(why), lines
    assert fills or not lines


def halved(monkeypatch):
    """Follows the line that measures, too."""
    monkeypatch.setattr(tfopt.batch, "find", lambda model, data: as_dataset(data))


@pytest.mark.parametrize("name", ALL | OTHERS)
def test_a_batch_twice_as_large_holds_the_same_rows(name, folder, monkeypatch):
    halved(monkeypatch)
    script = (ALL | OTHERS)[name]
    remedy = remedies.larger_batch(training(script, folder))
    after = World(folder).run(remedied(script, remedy))
    if name in ("PyDataset", "endless"):
        assert remedies.NO_LINE in remedy
        return
    before = as_it_is(script, folder)
    assert max(max(after.sizes)) == 2 * BATCH
    assert after.rows == before.rows


@pytest.mark.parametrize("name", ALL | OTHERS)
def test_all_batches_get_one_shape(name, folder):
    script = (ALL | OTHERS)[name]
    remedy = remedies.shapes(training(script, folder))
    if remedies.only_said(remedy):
        assert name in ("PyDataset", "endless", *LOADERS), remedy
        return
    before, after = as_it_is(script, folder), World(folder).run(remedied(script, remedy))
    assert after.sizes == [[size for size in epoch if size == BATCH] for epoch in before.sizes]


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_through_a_pipeline_are_the_same_epochs(name):
    script = ARRAYS[name]
    found = training(script)
    before, after = as_it_is(script), World().run(remedied(script, remedies.slow_input(found)))
    same_epochs(before, after)
    if name == "in order":
        assert after.orders == before.orders
    if name == "split":
        rest = after.asked["validation_data"][0]
        np.testing.assert_array_equal(rest, X[27:])
        assert len(rest) + sum(after.sizes[0]) == ROWS


def test_workers_of_a_py_dataset_keep_its_order():
    found = training(BATCHES_OF)
    before = as_it_is(BATCHES_OF)
    after = World().run(remedied(BATCHES_OF, remedies.slow_input(found)))
    same_epochs(before, after)
    assert before.orders == after.orders


def test_a_plan_is_cached_by_its_own_option():
    before, after = as_it_is(PLAN), World().run(remedied(PLAN, remedies.slow_input(training(PLAN))))
    same_epochs(before, after)
    assert before.decoded["rows"] > after.decoded["rows"]
    kept = PLAN.replace("cache=None", 'cache="memory"')
    assert remedies.slow_input(training(kept)).startswith(remedies.NO_LINE)


def test_a_generator_has_no_line():
    assert remedies.slow_input(training(ENDLESS)).startswith(remedies.NO_LINE)
    assert remedies.only_said(remedies.opened_each_epoch(training(ENDLESS))[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in order", "generator", "loader", "shuffle, batch, map"])
def test_fit_runs_as_many_steps(name, folder):
    """Not one more at the end of data whose length is unknown."""
    script, found = ALL[name], training(ALL[name], folder)
    for remedy in remedies.slow_input(found), remedies.repeated(found):
        trained(script.replace("epochs=3", "epochs=2"), remedy, folder, same=name == "in order")


CALLBACKS = """
class Own(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        world.own.append(batch)

    def on_epoch_end(self, e, logs=None):
        world.own.append(f"epoch {e}")

    def on_test_end(self, logs=None):
        world.own.append("test")

class Kept(keras.callbacks.ModelCheckpoint):
    def _save_model(self, epoch, batch, logs):
        world.saved.append(int(self.model.optimizer.iterations))

model = made()
model.fit(x, y, batch_size=12, epochs=12, verbose=0, validation_data=(x, y), callbacks=[CALLBACK])
"""


def called(callback, hook, epochs=12, **given):
    """The script before and after the remedy for a callback's hook between epochs, and what the remedy saves."""
    script = CALLBACKS.replace("CALLBACK", callback).replace("epochs=12", f"epochs={epochs}")
    found = training(script)
    remedy, saved = remedies.between_epochs(found, found.callbacks[0], hook)
    return *trained(script, remedy), remedy, saved


def trained(script, remedy, folder=None, same=True):
    """What happened in a script that trains, before and after a remedy: as many steps, and to the same weights."""
    worlds = World(folder, fits=True).run(script), World(folder, fits=True).run(remedied(script, remedy))
    assert len({int(world.model.optimizer.iterations) for world in worlds}) == 1
    for one, other in zip(*(world.model.get_weights() for world in worlds), strict=True) if same else ():
        np.testing.assert_allclose(one, other, rtol=1e-6)
    return worlds


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "ran"), [(12, [4, 9, 11]), (3, [2])])
def test_the_end_of_an_epoch_in_a_callback_of_ones_own(epochs, ran):
    before, after, _, saved = called("Own()", "on_epoch_end", epochs)
    of_epochs = [[one for one in world.own if str(one).startswith("epoch")] for world in (before, after)]
    assert of_epochs == [[f"epoch {e}" for e in range(epochs)], [f"epoch {e}" for e in ran]]
    assert saved == pytest.approx(1 - len(ran) / epochs)


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "ran"), [(10, [15, 30]), (12, [15, 30]), (3, [9])])
def test_saves_of_keras_own_checkpoint(epochs, ran):
    before, after, remedy, saved = called('Kept("model.keras")', "on_epoch_end", epochs)
    assert before.saved == [3 * (epoch + 1) for epoch in range(epochs)]
    assert after.saved == ran
    assert saved == pytest.approx(1 - len(ran) / epochs)
    assert ("Does not save the last 2" in remedy) == (epochs == 12)


@pytest.mark.parametrize(
    "callback",
    [
        'Kept("model.keras", save_best_only=True)',
        'Kept("{epoch}-{val_loss}.keras")',
        "keras.callbacks.EarlyStopping(patience=20)",
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)",
        'keras.callbacks.TensorBoard("logs")',
        'keras.callbacks.BackupAndRestore("folder")',
    ],
)
def test_no_line_for_what_a_callback_of_keras_cannot_do(callback):
    script = CALLBACKS.replace("CALLBACK", "").replace("epochs=12", "epochs=12, initial_epoch=0")
    found = training(script)
    one = eval(callback, {"keras": keras, "Kept": keras.callbacks.ModelCheckpoint})
    assert remedies.only_said(remedies.between_epochs(found, one, "on_epoch_end")[0])


def test_what_keras_own_callbacks_can_do_less_often():
    found = training(CALLBACKS.replace("CALLBACK", ""))
    board = keras.callbacks.TensorBoard("logs", histogram_freq=1, update_freq=10)
    backup = keras.callbacks.BackupAndRestore("folder", save_freq=2)
    checkpoint = keras.callbacks.ModelCheckpoint("model.keras", save_freq=1)
    assert remedies.between_epochs(found, board, "on_epoch_end") == ("TensorBoard(..., histogram_freq=5)", 0.8)
    said = {
        'TensorBoard(..., update_freq="epoch")': board,
        'BackupAndRestore(..., save_freq="epoch")': backup,
        "ModelCheckpoint(..., save_freq=10)": checkpoint,
    }
    for remedy, callback in said.items():
        assert remedies.in_each_batch(found, callback, ["on_train_batch_end"])[0] == remedy
    counted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    assert remedies.only_said(remedies.in_each_batch(found, counted, ["on_train_batch_end"])[0])


@pytest.mark.slow
def test_the_end_of_validation_has_no_epoch():
    *_, remedy, saved = called("Own()", "on_test_end")
    assert remedies.only_said(remedy)
    assert saved == 0


@pytest.mark.slow
def test_an_epoch_alone_saves_nothing():
    *_, remedy, saved = called("Own()", "on_epoch_end", 1)
    assert remedies.only_said(remedy)
    assert saved == 0


@pytest.mark.slow
def test_fewer_batches_of_a_callback():
    script = CALLBACKS.replace("CALLBACK", "Own()").replace("batch_size=12", "batch_size=1")
    found = training(script)
    remedy, saved = remedies.in_each_batch(found, found.callbacks[0], ["on_train_batch_end"])
    before, after = trained(script, remedy)
    batches = [[one for one in world.own if isinstance(one, int)] for world in (before, after)]
    assert [len(each) for each in batches] == [12 * ROWS, 12]
    assert saved == pytest.approx(1 - 1 / ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "validated"), [(10, 2), (3, 3)])
def test_less_validation(epochs, validated):
    script = CALLBACKS.replace("CALLBACK", "Own()").replace("batch_size=12", "batch_size=4")
    script = script.replace("epochs=12", f"epochs={epochs}")
    remedy, saved = remedies.validation(training(script), 9)
    _, after = trained(script, remedy)
    assert after.own.count("test") == validated
    assert saved == pytest.approx(1 - (2 / 9 if epochs == 3 else 1 / 5))


def test_who_decides_by_the_validation_is_named():
    script = CALLBACKS.replace("CALLBACK", "keras.callbacks.EarlyStopping(patience=20)")
    assert "EarlyStopping then decides" in remedies.validation(training(script), 9)[0]
    saves = CALLBACKS.replace("CALLBACK", 'Kept("model.keras")')
    assert "decides" not in remedies.validation(training(saves), 9)[0]
    lone = SimpleNamespace(callbacks=(), epochs=1, epochs_per_validation=1)
    assert remedies.only_said(remedies.validation(lone, 1)[0])
