import keras
import numpy as np
import pytest

from tfopt import repairs
from tfopt.compress.versions import footprint
from tfopt.compress.versions.rebuilding import rebuilt, require_same
from tfopt.compress.versions.requirements import trial_batch
from tfopt.errors import TfoptError, UnsupportedError

_L = keras.layers


class Logits(keras.layers.Layer):
    """Multiplies by the table of an embedding that is a layer of the model as well."""

    def __init__(self, embedding, **options):
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x):
        return x @ keras.ops.transpose(self.embedding.embeddings)

    def get_config(self):
        return super().get_config() | {"embedding": keras.saving.serialize_keras_object(self.embedding)}

    @classmethod
    def from_config(cls, config):
        return cls(**config | {"embedding": keras.saving.deserialize_keras_object(config["embedding"])})


def with_logits(make):
    x = keras.Input((4,), dtype="int32")
    embedding = _L.Embedding(7, 3, name="words")
    model = keras.Model(x, make(embedding)(embedding(x)), name="net")
    model.compile("sgd", "mse")
    return model


def test_weights_that_two_layers_share_are_refused_by_name():
    model = with_logits(lambda embedding: Logits(embedding, name="logits"))
    with pytest.raises(UnsupportedError, match="Found 'words' and 'logits', which share 'words/embeddings' and would"):
        rebuilt(model)


def test_weights_that_a_clone_would_share_with_the_model_are_refused():
    model = with_logits(lambda e: _L.Lambda(lambda x: x @ keras.ops.transpose(e.embeddings)))
    batch = (np.zeros((2, 4), "int32"),)
    other = rebuilt(model)
    with pytest.raises(UnsupportedError, match="Found 'words/embeddings' of 'net', which a Lambda, an activation"):
        require_same(model, other, batch, "a clone")


class Noise(keras.layers.Layer):
    """Draws in inference."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seeds)


def test_a_model_that_draws_in_inference_is_the_same_as_its_clone_and_does_not_move():
    model = keras.Sequential([keras.Input((4,)), _L.Dense(3), Noise()])
    model.compile("sgd", "mse")
    before = [variable.numpy() for variable in model.variables]
    batch = (np.ones((2, 4), "float32"), np.ones((2, 3), "float32"))
    other = rebuilt(model)
    require_same(model, other, trial_batch(other, batch), "a clone")
    for one in (model, other):
        footprint._ForwardTimer(one, batch)(2, warmup=1)
        for variable, value in zip(one.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)


class Stack(keras.layers.Layer):
    """Its config leaves out how many layers it has."""

    def __init__(self, count=1, **options):
        super().__init__(**options)
        self.layers = [_L.Identity() for _ in range(count)]

    def call(self, x):
        return x

    def get_config(self):
        return super(keras.layers.Layer, self).get_config()


def test_a_clone_with_other_layers_inside_is_refused_by_name():
    model = keras.Sequential([keras.Input((2,)), Stack(3, name="stack")])
    with pytest.raises(UnsupportedError, match=r"Found 'stack' \(Stack\): its clone has other layers inside"):
        rebuilt(model)


def test_outputs_of_which_none_is_finite_are_not_taken_for_the_same():
    model = keras.Sequential([keras.Input((2,)), _L.Dense(3)], name="net")
    other = keras.models.clone_model(model)
    with pytest.raises(TfoptError, match="'net' computes only NaN or infinity on the first batch"):
        require_same(model, other, (np.full((4, 2), np.nan),), "a clone")


@pytest.mark.parametrize("scaled", [True, False])
def test_the_options_of_compile_are_those_that_the_repair_of_loss_scaling_has_noted(scaled):
    model = keras.Sequential([keras.Input((2,)), _L.Dense(3, dtype="mixed_float16")])
    with repairs.LOSS_SCALING.during():
        model.compile("sgd", "mse", auto_scale_loss=scaled)
        assert isinstance(rebuilt(model).optimizer, keras.optimizers.LossScaleOptimizer) == scaled


def test_weights_that_are_frozen_one_by_one_stay_so():
    model = keras.Sequential([keras.Input((4,)), _L.Dense(3, name="first"), _L.Dense(2)])
    model.get_layer("first").bias.trainable = False
    model.compile("sgd", "mse")
    copy = rebuilt(model)
    assert [weight.trainable for weight in copy.weights] == [True, False, True, True]
    before = copy.get_layer("first").bias.numpy()
    copy.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    assert np.array_equal(copy.get_layer("first").bias, before)


@pytest.mark.parametrize("by", ["names", "variables"])
@pytest.mark.parametrize("scaled", [False, True])
def test_what_no_weight_decay_reaches_stays_so(by, scaled):
    """Where no gradient arrives, weight decay alone moves weights."""
    model = keras.Sequential([keras.Input((4,)), _L.Dense(3, name="first"), _L.Dense(2, name="second")])
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    excluded = {"var_names": ["bias"]} if by == "names" else {"var_list": [layer.bias for layer in model.layers]}
    optimizer.exclude_from_weight_decay(**excluded)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse", jit_compile=False)
    for layer in model.layers:
        layer.bias.assign(np.ones_like(layer.bias))
    copy = rebuilt(model)
    for each in (model, copy):
        each.fit(np.ones((8, 4)), np.ones((8, 2)), sample_weight=np.zeros(8), verbose=0)
    assert all(map(np.array_equal, copy.get_weights(), model.get_weights()))
    assert np.array_equal(copy.get_layer("first").bias, np.ones(3))


def test_options_that_were_set_after_compile_hold():
    model = keras.Sequential([keras.Input((4,)), _L.Dense(2)])
    model.compile("sgd", "mse", jit_compile=True, steps_per_execution=4)
    model.jit_compile, model.run_eagerly, model.steps_per_execution = False, True, 8
    copy = rebuilt(model)
    assert (copy.jit_compile, copy.run_eagerly, copy.steps_per_execution) == (False, True, 8)
