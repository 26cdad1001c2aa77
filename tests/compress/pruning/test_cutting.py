"""The smaller model computes, and trains to, exactly what the masked one does, for nets of every kind."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from prunable_nets import NETS, inputs_of, randomized

from tfopt.compress.pruning.graph import graph_of
from tfopt.compress.pruning.masking import apply, channel_masks
from tfopt.compress.pruning.selecting import choose, kept_of, scorer
from tfopt.compress.versions.rebuilding import rebuilt


def compiled(model):
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def cut_at_random(model, sparsity=0.5, seed=2):
    """The masked model, the smaller one, the graph and what was cut."""
    masked = rebuilt(model)
    graph = graph_of(masked)
    scores = np.random.default_rng(seed).permutation(1_000_000)
    cut = choose(graph, scores, sparsity)
    smaller = rebuilt(masked, graph.configs(cut), graph.kept(cut))
    apply(channel_masks(graph, cut))
    return masked, smaller, graph, cut


def outputs(model, x):
    return [part.numpy() for part in keras.tree.flatten(model(x, training=False))]


def sgd_step(model, x):
    with tf.GradientTape() as tape:
        parts = keras.tree.flatten(model(x, training=True))
        loss = sum(tf.reduce_mean((part - 1.0) ** 2) for part in parts)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def assert_cut_exactly(model, sparsity=0.5):
    x = inputs_of(model)
    masked, smaller, graph, cut = cut_at_random(model, sparsity)
    assert smaller.count_params() < masked.count_params()
    for truth, found in zip(outputs(masked, x), outputs(smaller, x), strict=True):
        assert found.shape == truth.shape
        np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)
    sgd_step(masked, x)
    sgd_step(smaller, x)
    apply(channel_masks(graph, cut))
    for truth, found in zip(rebuilt(masked, graph.configs(cut), graph.kept(cut)).weights, smaller.weights, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(truth), rtol=1e-3, atol=1e-5, err_msg=found.path)
    return graph, cut


QUICK = ("mlp", "vgg", "resnet", "mobilenet", "grouped", "text", "nested", "shared", "channels_first")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NETS])
def test_the_smaller_model_computes_and_trains_as_the_masked_one(name):
    assert_cut_exactly(compiled(randomized(NETS[name]())))


CUT = {
    "mlp": "first 6/12, second 5/10, third 4/8",
    "vgg": "one 4/8, two 6/12, three 8/16",
    "resnet": "stem 4/8, conv2d 3/6, same 4/8, conv2d_1 3/6, down 8/16, projection 8/16",
    "mobilenet": "stem 4/8, expand 8/16, squeeze 2/4, excite 16/32, project 4/8, separable 5/10",
    "squeezed": "stem 4/8, gate 4/8",
    "grouped": "wide 4/8",
    "unet": "down 3/6, bottom 4/8, up 3/6, merge 3/6",
    "vit": "attention (heads) 2/4, attention_mlp 6/12, second (heads) 1/2, second_mlp 6/12",
    "text": "grouped (heads) 2/3, grouped_mlp 6/12, one_key (heads) 2/4, one_key_mlp 6/12",
    "attention_without_norm": "wide 4/8, grouped (heads) 1/2, grouped 4/8, memory 4/8, cross (heads) 2/4, cross 5/10",
    "two_ways": "see 4/8, left 3/6, right 3/6, deep 3/5",
    "nested": "before 4/8, inner/hidden 5/10, inner/back 4/8, tail/a 3/6, tail/b 2/4",
    "shared": "tower 4/8, other 4/8, head 3/6",
    "channels_first": "grid 3/6",
    "generator": "grid 27/54, up 4/8",
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_cut(name):
    keras.backend.clear_session()  # for names without a counter from other tests
    model = compiled(NETS[name]())
    graph = graph_of(model)
    cut = choose(graph, np.arange(10_000), 0.5)
    found = [f"{path} {kept}/{had}" for path, (kept, had) in graph.channels(cut).items()]
    assert sorted(found) == sorted(CUT[name].split(", "))


LEFT = {
    "mlp": {"logits": "they are the model's output 'logits'"},
    "squeezed": {"places": "'multiply_1' (Multiply) spreads it over all channels"},
    "vit": {"patches": "'layer_normalization' (LayerNormalization) normalizes over them, so that each depends on all"},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_named(name):
    keras.backend.clear_session()
    left = graph_of(NETS[name]()).left
    assert {path: left[path] for path in LEFT[name]} == LEFT[name]


def test_a_masked_unit_of_an_mlp_is_one_that_numpy_leaves_out():
    model = compiled(
        randomized(keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "sigmoid"), keras.layers.Dense(2)]))
    )
    x = inputs_of(model)
    graph = graph_of(model)
    scores = np.zeros(100)
    units = graph.groups[0]
    scores[units[[1, 2, 5]]] = 1
    cut = choose(graph, scores, 0.5)
    smaller = rebuilt(model, graph.configs(cut), graph.kept(cut))
    kernel, bias, second, shift = (np.asarray(weight) for weight in model.weights)
    hidden = 1 / (1 + np.exp(-(x @ kernel + bias)))[:, [1, 2, 5]]
    np.testing.assert_allclose(smaller(x), hidden @ second[[1, 2, 5]] + shift, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.1, 0.75, 0.99])
def test_other_shares(sparsity):
    assert_cut_exactly(compiled(randomized(NETS["mobilenet"]())), sparsity)


@pytest.mark.parametrize(
    ("count", "sparsity", "kept"),
    [
        (8, 0.5, 4),
        (5, 0.5, 3),
        (3, 0.9, 1),
        (32, 0.25, 24),
        (64, 0.5, 32),
        (100, 0.5, 48),
        (96, 0.3, 64),
        (48, 0.01, 48),
    ],
)
def test_how_many_stay(count, sparsity, kept):
    assert kept_of(count, sparsity) == kept


@pytest.mark.parametrize("importance", ["taylor", "norm"])
def test_what_is_needed_least_is_cut(importance):
    model = compiled(randomized(NETS["mlp"]()))
    first, second = model.get_layer("first"), model.get_layer("second")
    useless = [0, 3, 4, 7, 8, 11]
    first.kernel.assign(np.asarray(first.kernel) * (0.01 if importance == "norm" else 1) ** np.isin(range(12), useless))
    if importance == "taylor":
        second.kernel.assign(np.asarray(second.kernel) * (1e-4 ** np.isin(range(12), useless))[:, None])
    graph = graph_of(model)
    data = (inputs_of(model, 16), np.ones((16, 3), "float32"))
    cut = choose(graph, scorer(graph, model, data, importance)(), 0.5)
    assert np.flatnonzero(np.isin(graph.made["first"], cut)).tolist() == useless
