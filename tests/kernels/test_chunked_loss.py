"""Training with the loss in pieces: weights, losses and metrics as with Keras' own."""

import itertools
from functools import partial

import keras
import numpy as np
import pytest
from language_nets import (
    EXAMPLES,
    LENGTH,
    VOCABULARY,
    Subclassed,
    batched,
    compiled,
    cross_entropy,
    dense_net,
    tied_net,
    tokens,
)
from plain_attention import rounding
from quick import first_quick

from tfopt import fit as tfopt_fit
from tfopt.kernels import chunk_cross_entropy, explain, undo

METRICS = keras.metrics


pytestmark = pytest.mark.usefixtures("exact_products")


def paths(model):
    (row,) = (row for row in explain(model).layers if row.kernel == "chunked cross-entropy")
    return row.training, row.inference


def check_same_training(make, *data, chunks=3, limit=1e-5, epochs=2, change=lambda model: model, inference=()):
    """Trains a stock model and one in pieces, evaluates both, and compares everything."""
    data = data or tokens()
    stock, pieces = (change(make()) for _ in range(2))
    assert chunk_cross_entropy(pieces, chunks) == 1
    begun, moved = stock.get_weights(), []
    histories = [
        model.fit(batched(*data), epochs=epochs, validation_data=batched(*data), shuffle=False, verbose=0).history
        for model in (stock, pieces)
    ]
    assert paths(pieces) == ((), inference)
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=limit, err_msg=name)
    for before, one, other in zip(begun, stock.get_weights(), pieces.get_weights(), strict=True):
        assert np.abs(one - other).max() <= limit * np.abs(one).max()
        moved.append(np.abs(one - before).max() > 10 * limit * np.abs(one).max())
    assert any(moved), "trained too little to show a difference"
    np.testing.assert_allclose(pieces.predict(data[0], verbose=0).shape, (len(data[0]), data[0].shape[1], VOCABULARY))
    return stock, pieces


HEADS = {
    "dense": dense_net,
    "without a bias": partial(dense_net, head=lambda: keras.layers.Dense(VOCABULARY, use_bias=False)),
    "tied": tied_net,
    "untied": partial(tied_net, tied=False),
    "soft cap": partial(tied_net, soft_cap=1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", first_quick(list(HEADS)))
@pytest.mark.parametrize("jit_compile", first_quick([False, True]))
def test_heads(make, jit_compile):
    check_same_training(partial(HEADS[make], metrics=["accuracy"], jit_compile=jit_compile))


@pytest.mark.slow
def test_float64():
    check_same_training(partial(dense_net, "float64", metrics=["accuracy"]), limit=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("make", [dense_net, tied_net])
def test_16_bits_stay_as_close_to_float32_as_with_keras(policy, jit_compile, make):
    nets = [make(), *(make(policy, jit_compile=jit_compile) for _ in range(2))]
    assert chunk_cross_entropy(nets[2], 3) == 1
    losses = [net.fit(batched(*tokens()), shuffle=False, verbose=0).history["loss"][0] for net in nets]
    assert paths(nets[2])[0] == ()
    exact, stock, pieces = (np.concatenate([weight.ravel() for weight in net.get_weights()]) for net in nets)
    assert np.linalg.norm(pieces - exact) <= 1.2 * np.linalg.norm(stock - exact)
    np.testing.assert_allclose(losses[2], losses[1], rtol=rounding(policy.removeprefix("mixed_"), 3))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", ["auto", 1, 2, 5, 56, 1000])
def test_numbers_of_pieces_that_do_not_divide(chunks):
    check_same_training(tied_net, *tokens(length=7), chunks=chunks)


WEIGHTS = {
    "none": None,
    "tokens": lambda random: random.uniform(size=(24, LENGTH)),
    "examples": lambda random: random.uniform(size=(24, 1)),
    "padding": lambda random: random.integers(2, size=(24, LENGTH)),
    "none left": lambda random: np.zeros((24, LENGTH)),
}


REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")


@pytest.mark.parametrize(
    ("ignore_class", "weights", "reduction"),
    first_quick(list(itertools.product([-1, 4, None], WEIGHTS, REDUCTIONS)), 0, every=7),
)
def test_reductions_with_weights_masks_and_ignored_classes(ignore_class, weights, reduction):
    x, y = tokens()
    if ignore_class == -1:
        y[:, ::3] = -1
    given = [] if WEIGHTS[weights] is None else [WEIGHTS[weights](np.random.default_rng(2)).astype("float32")]
    scale = 1 / (EXAMPLES * LENGTH) if reduction == "sum" else 1.0

    def make():
        return dense_net(
            mask_zero=True,
            loss=cross_entropy(reduction=reduction, ignore_class=ignore_class),
            optimizer=keras.optimizers.SGD(0.5 * scale),
            weighted_metrics=["accuracy"],
        )

    if weights == "none left":
        stock, pieces = make(), make()
        chunk_cross_entropy(pieces, 3)
        losses = [model.fit(batched(x, y, *given), shuffle=False, verbose=0).history for model in (stock, pieces)]
        assert losses[0] == losses[1]
    else:
        check_same_training(make, x, y, *given)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", first_quick([False, True]))
def test_metrics_count_the_same_tokens(jit_compile):
    def make():
        metrics = [
            "accuracy",
            METRICS.SparseTopKCategoricalAccuracy(5, name="top5"),
            METRICS.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3, name="entropy"),
        ]
        return tied_net(
            metrics=metrics, weighted_metrics=[METRICS.SparseCategoricalAccuracy("weighted")], jit_compile=jit_compile
        )

    weights = np.random.default_rng(2).integers(2, size=(24, LENGTH)).astype("float32")
    stock, pieces = check_same_training(make, *tokens(), weights)
    for one, other in zip(stock.metrics_variables, pieces.metrics_variables, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.slow
def test_batches_of_different_lengths_weigh_in_metrics_as_with_keras():
    stock, pieces = (dense_net(metrics=["accuracy"]) for _ in range(2))
    chunk_cross_entropy(pieces, 3)
    for length in (3, 7):
        results = [model.train_on_batch(*tokens(length=length)) for model in (stock, pieces)]
        np.testing.assert_allclose(*results, rtol=1e-5)


@pytest.mark.slow
def test_perplexity_of_keras_hub():
    hub = pytest.importorskip("keras_hub")

    def make():
        metrics = [
            hub.metrics.Perplexity(from_logits=True),
            hub.metrics.Perplexity(True, mask_token_id=2, name="other"),
        ]
        return tied_net("mixed_bfloat16", metrics=metrics)

    check_same_training(make, limit=rounding("bfloat16", 6))


@pytest.mark.slow
def test_gpt2_of_keras_hub():
    hub = pytest.importorskip("keras_hub")

    def make():
        keras.utils.set_random_seed(3)
        backbone = hub.models.GPT2Backbone(VOCABULARY, 1, 2, 16, 32, dropout=0.0, max_sequence_length=LENGTH)
        model = hub.models.GPT2CausalLM(backbone)
        model.compile(keras.optimizers.SGD(0.5), jit_compile=False)
        return model

    (x, y), weights = tokens(), np.random.default_rng(2).integers(2, size=(24, LENGTH)).astype("float32")
    stock, pieces = make(), make()
    assert chunk_cross_entropy(pieces, 3) == 1
    inputs = {"token_ids": x, "padding_mask": np.ones_like(x)}
    histories = [
        model.fit(inputs, y, batch_size=8, epochs=2, sample_weight=weights, shuffle=False, verbose=0).history
        for model in (stock, pieces)
    ]
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    for one, other in zip(stock.get_weights(), pieces.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert paths(pieces)[0] == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["overlap", "accumulation", "executions", "loss weight", "regularizers", "frozen", "LoRA"]
)
def test_it_goes_together_with(case):
    def change(model):
        if case == "overlap":
            return tfopt_fit.overlap(model)
        if case == "frozen":
            model.layers[-1].trainable = False
        if case == "LoRA":
            model.layers[-1].enable_lora(4)
        options = {
            "accumulation": {"optimizer": keras.optimizers.SGD(0.5, gradient_accumulation_steps=3)},
            "executions": {"steps_per_execution": 2},
            "loss weight": {"loss_weights": 0.5},
        }
        return compiled(model, metrics=["accuracy"], **options.get(case, {}))

    def make():
        options = {"kernel_regularizer": "l2"} if case == "regularizers" else {}
        return dense_net(head=partial(keras.layers.Dense, VOCABULARY, **options))

    check_same_training(make, change=change)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_subclassed_models(tied):
    def make():
        keras.utils.set_random_seed(3)
        model = Subclassed(tied=tied)
        model(tokens()[0])
        return compiled(model)

    check_same_training(make)


def test_loss_scaling_finds_an_overflow_and_goes_on():
    model = tied_net("mixed_float16")
    chunk_cross_entropy(model, 3)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(2.0**31)
    before = model.get_weights()
    model.fit(batched(*tokens(batches=1)), verbose=0, shuffle=False)
    assert float(model.optimizer.dynamic_scale) == 2.0**30
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))


@pytest.mark.slow
def test_undo_returns_to_keras_and_a_change_of_pieces_is_traced():
    model = dense_net()
    model.fit(batched(*tokens()), verbose=0, shuffle=False)
    assert chunk_cross_entropy(model, 3) == 1
    assert chunk_cross_entropy(model, 3) == 0
    assert chunk_cross_entropy(model, 4) == 1
    assert paths(model) == (None, None)
    model.fit(batched(*tokens()), verbose=0, shuffle=False)
    assert paths(model) == ((), None)
    assert undo(model) == 2
    assert not explain(model).layers
    assert not {"compute_loss", "compute_metrics"} & vars(model).keys()
