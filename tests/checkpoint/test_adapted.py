"""What layers have adapted is part of a checkpoint: another vocabulary, scale or bin is refused by name."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt import checkpoint
from tfopt.callbacks import TrainingCheckpoint
from tfopt.checkpoint.adapted import adapted, differences
from tfopt.errors import CheckpointError
from tfopt.pipelines import per_batch, plan_pipeline

FEW, MORE = ["b", "a", "b", "c"], ["c", "c", "c", "b", "a", "b"]  # as many tokens, in another order


def lookup(words, **options):
    layer = keras.layers.StringLookup(**options)
    layer.adapt(tf.constant(words))
    return layer


def vectorization(words):
    layer = keras.layers.TextVectorization(output_sequence_length=1)
    layer.adapt(tf.constant(words))
    return layer


def normalization(values):
    layer = keras.layers.Normalization(axis=None)
    layer.adapt(np.array(values, "float32"))
    return layer


def bins(values):
    layer = keras.layers.Discretization(num_bins=3)
    layer.adapt(np.array(values, "float32"))
    return layer


def space(words):
    found = keras.utils.FeatureSpace({"word": "string_categorical"})
    found.adapt(tf.data.Dataset.from_tensor_slices({"word": words}))
    return found


def frequencies(words):
    return lookup(words, output_mode="tf_idf")


PAIRS = {
    "StringLookup": (lambda: lookup(FEW), lambda: lookup(MORE), "the vocabulary of 'string_lookup.*at 1, 'b' here"),
    "tf-idf": (lambda: frequencies(FEW), lambda: frequencies(["b", "b", "a", "c", "a"]), "the tf-idf weights of"),
    "IntegerLookup": (
        lambda: keras.layers.IntegerLookup(vocabulary=[1, 2]),
        lambda: keras.layers.IntegerLookup(vocabulary=[2, 1]),
        "the vocabulary of 'integer_lookup",
    ),
    "TextVectorization": (lambda: vectorization(FEW), lambda: vectorization(MORE), "the vocabulary of 'string_lookup"),
    "Normalization": (lambda: normalization([1, 2]), lambda: normalization([1, 2.1]), "the moments of 'normalization"),
    "Discretization": (lambda: bins([1, 2, 3]), lambda: bins([1, 5, 9]), "the bins of 'discretization"),
    "Hashing": (
        lambda: keras.layers.Hashing(9, salt=1),
        lambda: keras.layers.Hashing(9, salt=2),
        "the hashing of 'hashing",
    ),
    "FeatureSpace": (lambda: space(FEW), lambda: space(MORE), "the vocabulary of"),
}


class Holding(keras.Model):
    """A layer inside of a model inside of a model."""

    def __init__(self, layer):
        super().__init__()
        self.inner = keras.Sequential([layer]) if isinstance(layer, keras.layers.Layer) else layer


@pytest.mark.parametrize("name", PAIRS)
def test_what_a_layer_has_adapted_is_compared(name):
    one, other, said = PAIRS[name]
    saved = adapted(Holding(one()))
    assert saved
    assert differences(adapted(Holding(one())), saved) == []
    assert differences(adapted(Holding(one())), {}) == []  # of an earlier version
    found = differences(saved, adapted(Holding(other())))
    assert re.search(said, found[-1])


def test_moments_of_the_same_data_in_another_order_are_the_same():
    values = np.random.default_rng(0).normal(1e4, 1.0, 999).astype("float32")
    assert differences(adapted(Holding(normalization(values))), adapted(Holding(normalization(values[::-1])))) == []


def test_a_layer_that_only_one_has_is_named():
    text = "the vocabulary of 'words' only "
    plain, words = Holding(keras.layers.Hashing(9)), Holding(keras.layers.Hashing(9))
    words.more = lookup(FEW, name="words")
    assert differences(adapted(words), adapted(plain)) == [f"{text}here"]
    assert differences(adapted(plain), adapted(words)) == [f"{text}in the checkpoint"]


def net(words):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((), dtype="string"), lookup(words), keras.layers.Embedding(4, 2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=False)
    return model


def fit(model, folder, epochs=1):
    data = tf.data.Dataset.from_tensor_slices((FEW, [[1.0]] * 4)).batch(2)
    model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[TrainingCheckpoint(folder)])


def test_a_training_does_not_go_on_with_another_vocabulary(tmp_path):
    fit(net(FEW), tmp_path / "c")
    fit(net(FEW), tmp_path / "c", epochs=2)
    with pytest.raises(CheckpointError, match=r"adapted to the same data as .*vocabulary of 'string_lookup"):
        fit(net(MORE), tmp_path / "c", epochs=3)
    with pytest.raises(CheckpointError, match="4 entries here, 4 in the checkpoint; at 1, 'c' here, 'b' there"):
        checkpoint.restore(net(MORE), tmp_path / "c")
    assert checkpoint.restore(net(FEW), tmp_path / "c").step == 4
    skipped = checkpoint.restore(net(MORE), tmp_path / "c", partial=True).skipped
    assert ["the vocabulary of" in each for each in skipped] == [True]


def test_a_model_is_restored_without_the_layers_before_it(tmp_path):
    fit(model := net(FEW), tmp_path / "c")
    served = keras.Sequential([keras.Input((), dtype="int64"), keras.layers.Embedding(4, 2), keras.layers.Dense(1)])
    checkpoint.restore(served, tmp_path / "c")
    assert [weight.numpy().tolist() for weight in served.weights] == [each.numpy().tolist() for each in model.weights]


def through_a_closure(layer):
    return lambda word: layer(word)


@pytest.mark.parametrize(
    "function",
    [through_a_closure, lambda layer: per_batch(lambda words: layer(words)), lambda layer: layer],
    ids=["closure", "per_batch", "layer"],
)
def test_layers_in_the_functions_of_a_pipeline_are_compared(function):
    def found(words):
        plan = plan_pipeline(np.array(FEW), batch_size=2, transform=function(lookup(words, name="words")))
        return adapted(keras.Sequential([keras.layers.Dense(1)]), plan.build())

    assert differences(found(FEW), found(FEW)) == []
    (fault,) = differences(found(FEW), found(MORE))
    assert "the vocabulary of 'words'" in fault
