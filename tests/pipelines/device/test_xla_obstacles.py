"""Which functions of `augment` XLA can compile."""

import keras
import pytest
import tensorflow as tf

from tfopt.pipelines import per_batch
from tfopt.pipelines.device.placing import find_obstacles
from tfopt.pipelines.shared.options import PipelineOptions

SPEC = (tf.TensorSpec((4, 8, 8, 3), tf.uint8), tf.TensorSpec((4, 5)))


def bicubic(x, y):
    return tf.image.resize(x, (6, 6), "bicubic"), y


def in_python(x, y):
    return tf.ensure_shape(tf.py_function(lambda z: z, [x], tf.uint8), x.shape), y


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
    assert find_obstacles(PipelineOptions(augment=function, cache="device"), SPEC) == (obstacle,)


def test_each_function_is_given_what_the_ones_before_it_make():
    shapes = []

    def looking(x, y):
        shapes.append(x.shape)
        return x, y

    options = PipelineOptions(augment=[per_batch(bicubic), per_batch(looking)], cache="device")
    assert find_obstacles(options, SPEC) == ("XLA has no ResizeBicubic", None)
    assert set(shapes) == {tf.TensorShape((4, 6, 6, 3))}


def test_single_tensors_and_no_functions():
    assert find_obstacles(PipelineOptions(), SPEC) == ()
    assert find_obstacles(PipelineOptions(augment=per_batch(tf.abs)), tf.TensorSpec((4, 2))) == (None,)
