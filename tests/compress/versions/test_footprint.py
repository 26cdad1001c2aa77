import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.compress.versions import footprint


@pytest.mark.usefixtures("untimed")
def test_both_models_are_judged_on_the_same_batches():
    models = []
    for _ in range(2):
        x = keras.Input((1,))
        model = keras.Model(x, keras.layers.Identity()(x))
        model.compile(loss="mse", metrics=["mae"], steps_per_execution=2)
        models.append(model)
    values = np.arange(101.0, dtype="float32")[:, None]
    shuffled = tf.data.Dataset.from_tensor_slices((values, 0 * values)).shuffle(101).batch(2)
    one, other = footprint.footprints(tuple(models), shuffled.take(5), training=False)
    assert one.quality == other.quality
    found = footprint.footprints(tuple(models), shuffled, training=False)[1].quality
    assert found == pytest.approx({"loss": np.mean(values**2), "mae": np.mean(values)})
