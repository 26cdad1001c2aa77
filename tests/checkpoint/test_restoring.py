"""Back into a model: the weights, the optimizer if there is one, and what is refused."""

import keras
import numpy as np
import pytest
import resumed_fits
from models import WithoutCall, assert_same_state, state
from resumed_fits import BATCH, X, Y, dense_net

from tfopt import checkpoint
from tfopt.callbacks import TrainingCheckpoint
from tfopt.checkpoint.folder.store import Store
from tfopt.errors import CheckpointError


def net(**options):
    keras.backend.clear_session()
    model = dense_net(**options)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", jit_compile=False)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of three epochs, the model that was trained, and its weights after each epoch."""
    folder, weights = tmp_path_factory.mktemp("restored") / "saved", []
    model = net()
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()))
    model.fit(X, Y, BATCH, 3, verbose=0, callbacks=[note, TrainingCheckpoint(folder, every_epochs=1)])
    return folder, model, weights


def equal(ones, others):
    return len(ones) == len(others) and all(map(np.array_equal, ones, others))


@pytest.mark.slow
def test_weights_and_optimizer(saved):
    folder, trained, _ = saved
    model = net()
    restored = checkpoint.restore(model, folder)
    assert (restored.step, restored.skipped) == (21, ())
    ones, others = ([each.numpy() for each in (*one.variables, *one.optimizer.variables)] for one in (trained, model))
    assert equal(ones, others)
    assert str(restored) == f"step 21: {len(ones)} variables restored"
    assert restored.to_dict() == {"step": 21, "variables": len(ones), "skipped": []}


def test_an_earlier_step(saved):
    folder, _, weights = saved
    model = net()
    assert checkpoint.restore(model, folder, 14).step == 14
    assert equal(model.get_weights(), weights[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_without_an_optimizer_gets_its_weights(saved, compiled):
    folder, _, weights = saved
    keras.backend.clear_session()
    model = dense_net()
    if compiled:
        model.compile(loss="mse", optimizer=None)
    checkpoint.restore(model, folder)
    assert equal(model.get_weights(), weights[-1])


def test_a_model_that_is_built_again_in_the_same_process(saved):
    folder, _, weights = saved
    net()
    model = dense_net()  # whose layers are dense_2, dense_3
    checkpoint.restore(model, folder)
    assert equal(model.get_weights(), weights[-1])


def test_exported_weights_are_read_by_keras(saved, tmp_path):
    folder, trained, _ = saved
    model, other = net(), dense_net()
    checkpoint.restore(model, folder)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert np.array_equal(other.predict(X, verbose=0), trained.predict(X, verbose=0))


def changed():
    keras.backend.clear_session()
    layers = keras.layers
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def test_a_changed_model_is_refused_by_its_layers(saved):
    folder, *_ = saved
    model = changed()
    before = model.get_weights()
    expected = (
        r"Found differences: model/sequential/dense_1/kernel is float32 \(8, 3\) here, float32 \(8, 1\) in the "
        r"checkpoint, "
        r"model/sequential/dense_1/bias is float32 \(3,\) here, float32 \(1,\) in the checkpoint, .*partial=True"
    )
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.restore(model, folder)
    assert equal(model.get_weights(), before)


def test_what_fits_is_loaded_on_request(saved):
    folder, _, weights = saved
    model = changed()
    head = model.layers[-1].get_weights()
    restored = checkpoint.restore(model, folder, partial=True)
    assert equal(model.get_weights()[:6], weights[-1][:6])
    assert equal(model.layers[-1].get_weights(), head)
    assert (
        "model/sequential/dense_1/kernel is float32 (8, 3) here, float32 (8, 1) in the checkpoint" in restored.skipped
    )
    assert "skipped: " in str(restored)


def test_another_dtype_is_refused(saved):
    folder, *_ = saved
    with pytest.raises(CheckpointError, match=r"dense/kernel is bfloat16 \(6, 8\) here, float32"):
        checkpoint.restore(net(dtype="bfloat16"), folder)


@pytest.mark.parametrize(
    ("model", "step", "error", "match"),
    [
        (lambda: "model", None, TypeError, "keras.Model"),
        (resumed_fits.Unbuilt, None, ValueError, "Expected a built model"),
        (net, 3, CheckpointError, "Found the steps 7, 14, 21"),
        (net, -1, ValueError, "step"),
    ],
)
def test_wrong_arguments(saved, model, step, error, match):
    with pytest.raises(error, match=match):
        checkpoint.restore(model(), saved[0], step)


def test_a_folder_without_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match=r"Found none\. Check the path"):
        checkpoint.restore(net(), tmp_path)


def test_a_damaged_checkpoint_is_passed_over(saved, tmp_path, caplog):
    import shutil

    folder, _, weights = saved
    shutil.copytree(folder, tmp_path / "copy")
    newest = max((tmp_path / "copy").glob("*.json"))
    newest.write_text(newest.read_text().replace("float32", "float23", 1))
    model = net()
    assert checkpoint.restore(model, tmp_path / "copy").step == 14
    assert equal(model.get_weights(), weights[1])
    assert newest.name in caplog.text


def test_names_count_and_not_their_order(tmp_path):
    def heads(*names):
        inputs = keras.Input((2,))
        return keras.Model(inputs, [keras.layers.Dense(3, name=name)(inputs) for name in names])

    saved = heads("head_1", "head_2")
    with Store(tmp_path) as store:
        store.write(1, {f"model/{weight.path}": weight.numpy() for weight in saved.weights})
    other = heads("head_2", "head_1")
    checkpoint.restore(other, tmp_path)
    for name in ("head_1", "head_2"):
        assert equal(other.get_layer(name).get_weights(), saved.get_layer(name).get_weights())


def test_names_given_by_hand_keep_their_numbers(tmp_path):
    def blocks(first):
        names = [f"block_{number}" for number in range(first, first + 3)]
        return keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, name=name) for name in names)])

    saved, other = blocks(1), blocks(2)
    with Store(tmp_path) as store:
        store.write(1, {f"model/{weight.path}": weight.numpy() for weight in saved.weights})
    assert checkpoint.restore(other, tmp_path, partial=True).variables == 4
    for name in ("block_2", "block_3"):
        assert equal(other.get_layer(name).get_weights(), saved.get_layer(name).get_weights())


class Large(keras.Layer):
    """A weight that a checkpoint's reader maps from the disk."""

    def __init__(self, dtype):
        super().__init__(dtype=dtype)

    def build(self, shape):
        shape, initializer = (2**18, 5), "random_normal" if "float" in self.dtype else "ones"
        self.large = self.add_weight(shape=shape, initializer=initializer, dtype=self.dtype)

    def call(self, inputs):
        return inputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_a_large_weight_is_no_longer_that_of_the_file(tmp_path, dtype):
    model = keras.Sequential([keras.Input((1,), dtype=dtype), Large(dtype)])
    before = model.layers[0].large.numpy()
    with Store(tmp_path) as store:
        store.write(1, {f"model/{weight.path}": weight.numpy() for weight in model.weights})
    for weight in model.weights:
        weight.assign(np.zeros(weight.shape, before.dtype))
    checkpoint.restore(model, tmp_path)
    for blob in (tmp_path / "blobs").iterdir():
        blob.write_bytes(bytes(blob.stat().st_size))  # the same file: whoever maps it would see this
    assert np.array_equal(model.layers[0].large.numpy(), before)


@pytest.mark.slow
def test_a_model_without_a_call(tmp_path):
    models = []
    for _ in range(2):
        keras.backend.clear_session()
        models.append(WithoutCall())
        models[-1].compile("adam", jit_compile=False)
    trained, model = models
    trained.fit(X, verbose=0, callbacks=[TrainingCheckpoint(tmp_path)])
    checkpoint.restore(model, tmp_path)
    assert_same_state(state(model), state(trained))
    with pytest.raises(ValueError, match=r"Expected a built model\. Received: 'pair'"):
        checkpoint.restore(WithoutCall(built=False), tmp_path)
