"""What a training step takes, beside figures counted by hand."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state, summed_in_one_order

import tfopt
from tfopt.errors import UnsupportedError
from tfopt.memory import MemoryEstimate, estimate
from tfopt.model.layers import layer_paths

LAYERS = keras.layers
EXAMPLES, WIDTH = 1024, 512
KEPT_MIB = EXAMPLES * WIDTH * 4 / 2**20  # what a dense layer of that width keeps


def dense_net(policy="float32", depth=6, optimizer="adam", jit_compile=False):
    net = keras.Sequential([keras.Input((256,))], name="net")
    for number in range(depth):
        net.add(LAYERS.Dense(WIDTH, activation="relu", name=f"dense_{number}", dtype=policy))
    net.add(LAYERS.Dense(10, name="scores", dtype="float32"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, jit_compile=jit_compile)
    return net


def specs(examples=EXAMPLES, width=256):
    return tf.TensorSpec((examples, width), "float32"), tf.TensorSpec((examples,), "int32")


def weights_mib(net):
    return sum(np.prod(weight.shape) for weight in net.trainable_variables) * 4 / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_parts_are_those_counted_by_hand(jit_compile):
    net = dense_net(jit_compile=jit_compile)
    found = estimate(net, specs())
    assert found.source == ("XLA's buffer assignment" if jit_compile else "the step's graph")
    assert found.batch_size == EXAMPLES
    assert found.batch_mib == EXAMPLES * (256 + 1) * 4 / 2**20
    assert found.weights_mib == pytest.approx(weights_mib(net), abs=1e-3)
    assert found.optimizer_mib == pytest.approx(2 * weights_mib(net), abs=1e-3)
    kept = {layer.path: layer.mib for layer in found.by_layer if layer.mib > KEPT_MIB / 2}
    # The last one's may be gone when the step takes most.
    assert {f"dense_{number}" for number in range(5)} <= set(kept) <= {f"dense_{number}" for number in range(6)}
    if jit_compile:  # XLA may keep what goes into an activation function beside what comes out
        assert set(kept.values()) <= {KEPT_MIB, 2 * KEPT_MIB}
    else:
        assert set(kept.values()) == {KEPT_MIB}
        # Two gradients of activations at once, and one or two of weights.
        assert 2 * KEPT_MIB <= found.gradients_mib + found.workspace_mib <= 5 * KEPT_MIB
    parts = ("weights", "optimizer", "batch", "activations", "gradients", "workspace")
    assert found.total_mib == pytest.approx(sum(getattr(found, f"{part}_mib") for part in parts))
    assert found.activations_mib == pytest.approx(sum(layer.mib for layer in found.by_layer))


@pytest.mark.slow
def test_16_bit_activations_and_32_bit_weights():
    single = estimate(dense_net(), specs())
    half = estimate(dense_net("mixed_bfloat16"), specs())
    assert half.weights_mib == pytest.approx(single.weights_mib)
    kept = {layer.path: layer.mib for layer in half.by_layer}
    assert kept["dense_0"] == KEPT_MIB / 2  # its 16-bit weights are not read again: there is no gradient of the images
    assert kept["dense_3"] == KEPT_MIB / 2 + WIDTH * WIDTH * 2 / 2**20


def test_launches_of_several_steps_hold_as_many_batches():
    model, given = small_net(jit_compile=False), batch()
    alone = estimate(model, given)
    tfopt.fit.overlap(model, steps_per_launch=5)
    assert estimate(model, given).batch_mib == 5 * alone.batch_mib


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_leaves_the_model_as_it_was(jit_compile):
    net, twin = (small_net(jit_compile=jit_compile) for _ in range(2))
    images, labels = batch()
    with summed_in_one_order():
        for model in (net, twin):
            model.fit(images, labels, batch_size=8, verbose=0, shuffle=False)
    before, function = state(net), net.train_function
    tf.random.set_seed(3)
    estimate(net, batch(8))
    drawn = tf.random.uniform(())
    tf.random.set_seed(3)
    assert drawn == tf.random.uniform(())
    assert net.train_function is function
    assert not any("call" in vars(layer) for layer in net.layers)
    assert_same_state(state(net), before)
    with summed_in_one_order():
        for model in (net, twin):
            model.fit(images, labels, batch_size=8, verbose=0, shuffle=False)
    assert_same_state(state(net), state(twin))


@pytest.mark.slow
def test_nothing_runs():
    net = small_net()
    weights = [weight.numpy() for weight in net.variables]
    estimate(net, batch())
    assert net.optimizer.iterations.numpy() == 0
    assert all(np.array_equal(one, other) for one, other in zip(weights, net.variables, strict=True))
    assert all(float(variable) == 0 for metric in net.metrics for variable in metric.variables)


@pytest.mark.slow
def test_data_and_specs_are_the_same_batch():
    net = dense_net(depth=1)
    images, labels = np.zeros((32, 256)), np.zeros(32, "int32")
    expected = estimate(net, specs(32))
    assert estimate(net, (images, labels)) == expected
    assert estimate(net, (tf.cast(images, "float32"), labels)) == expected
    assert estimate(net, (keras.KerasTensor((32, 256)), keras.KerasTensor((32,), "int32"))) == expected
    assert estimate(net, (images, labels, None)) == expected
    weighted = estimate(net, (images, labels, np.ones(32)))
    assert weighted.batch_mib == expected.batch_mib + 32 * 4 / 2**20


@pytest.mark.slow
def test_activations_of_a_loop_grow_with_its_trips():
    def kept(steps):
        net = keras.Sequential(
            [keras.Input((steps, 16)), LAYERS.LSTM(64, use_cudnn=False, name="memory"), LAYERS.Dense(1)]
        )
        net.compile("sgd", "mse", jit_compile=False)
        found = estimate(net, (np.zeros((64, steps, 16)), np.zeros((64, 1))))
        return sum(layer.mib for layer in found.by_layer if layer.path and layer.path.startswith("memory"))

    assert kept(40) / kept(20) == pytest.approx(2, rel=0.05)
    # Of each step at least the four gates, both states and their activation, each 64 × 64 numbers.
    assert 7 < kept(40) / (40 * 64 * 64 * 4 / 2**20) < 12


@pytest.mark.slow
def test_accumulated_gradients_are_the_optimizers():
    net = dense_net(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=2))
    assert estimate(net, specs()).optimizer_mib == pytest.approx(3 * weights_mib(net), abs=1e-3)


def test_gradients_that_wait_for_each_other():
    waiting = estimate(dense_net(optimizer=keras.optimizers.SGD(global_clipnorm=1.0)), specs(8))
    going = estimate(dense_net(optimizer=keras.optimizers.SGD()), specs(8))
    assert waiting.gradients_mib > 0.9 * weights_mib(dense_net()) > 2 * going.gradients_mib


class Pair(keras.Model):
    """Two networks with an optimizer each, never called as one."""

    def __init__(self):
        super().__init__()
        self.parts = [dense_net(depth=2), dense_net(depth=2)]
        self.first_optimizer, self.second_optimizer = keras.optimizers.Adam(), keras.optimizers.Adam()

    def train_step(self, data):
        images, _ = data
        for part, optimizer in zip(self.parts, (self.first_optimizer, self.second_optimizer), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(part(images, training=True) ** 2)
            weights = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.slow
def test_a_step_of_ones_own_with_two_optimizers():
    pair = Pair()
    pair.compile(jit_compile=False)
    found = estimate(pair, specs())
    assert found.optimizer_mib == pytest.approx(2 * weights_mib(pair), abs=1e-3)
    assert {layer.path for layer in found.by_layer if layer.mib == KEPT_MIB} <= set(layer_paths(pair).values())
    assert found.activations_mib >= 2 * KEPT_MIB


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = [LAYERS.Dense(WIDTH, activation="relu") for _ in range(3)]

    def build(self, shape):
        for layer in self.inner:
            layer.build((None, WIDTH))

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_recomputed_activations_do_not_count(jit_compile):
    net = keras.Sequential([keras.Input((WIDTH,)), *(Block() for _ in range(4)), LAYERS.Dense(1)])
    net.compile("sgd", "mse", jit_compile=jit_compile)
    data = np.zeros((EXAMPLES, WIDTH)), np.zeros((EXAMPLES, 1))
    before = estimate(net, data)
    assert tfopt.memory.recompute(net) > 1
    after = estimate(net, data)
    assert before.activations_mib >= 11 * KEPT_MIB
    assert after.activations_mib <= 7 * KEPT_MIB
    assert after.total_mib <= before.total_mib - 3 * KEPT_MIB
    paths = {*layer_paths(net).values(), None}
    assert {layer.path for layer in after.by_layer} <= paths
    assert max(after.by_layer, key=lambda layer: layer.mib).path is not None


def made_up(total_at, size):
    """An estimate whose totals are those of a function, and the sizes it was asked for."""
    asked = []

    def again(other):
        asked.append(other)
        return total_at(other)

    fixed = {"weights_mib": 1.0, "optimizer_mib": 2.0, "batch_mib": 0.0, "gradients_mib": 0.0, "workspace_mib": 0.0}
    kept = total_at(size) - 3
    found = MemoryEstimate(
        **fixed, activations_mib=kept, by_layer=(), batch_size=size, source="the step's graph", total_mib_at=again
    )
    return found, asked


@pytest.mark.parametrize(
    ("total_at", "most"),
    [
        pytest.param(lambda size: 3 + 0.25 * size, 4, id="straight"),
        pytest.param(lambda size: max(30, 3 + 0.25 * size), 12, id="bent"),
        pytest.param(lambda size: 3 + 0.25 * size + size**2 / 500, 12, id="square"),
        pytest.param(lambda size: 3 + 7 * (size // 32), 16, id="stairs"),
        pytest.param(lambda size: 3 + 8 * size**0.5, 12, id="root"),
    ],
)
@pytest.mark.parametrize("size", [1, 16, 200])
@pytest.mark.parametrize("limit", [4, 29, 40, 52.3, 1000])
def test_the_largest_batch_is_found_in_few_estimates(total_at, most, size, limit):
    found, asked = made_up(total_at, size)
    largest = found.largest_batch(limit)
    exact = max((other for other in range(1, 20_000) if total_at(other) <= limit), default=0)
    assert largest <= exact <= largest + max(1, largest // 100) - (largest < 200)
    assert len(asked) <= most


@pytest.mark.slow
def test_the_largest_batch_of_a_net_fits_and_a_larger_one_does_not():
    net = dense_net()
    found = estimate(net, specs())
    fixed = found.weights_mib + found.optimizer_mib
    for limit in ((fixed + found.total_mib) / 2, 3 * found.total_mib):
        largest = found.largest_batch(limit)
        assert estimate(net, specs(largest)).total_mib <= limit
        assert estimate(net, specs(largest + 1 + largest // 100)).total_mib > limit
    assert found.largest_batch(fixed - 1) == 0
    with pytest.raises(ValueError, match="Expected limit_mib to be above 0"):
        found.largest_batch(0)


class Fixed(keras.layers.Layer):
    def call(self, x):
        return keras.ops.reshape(x, (32, 256))


def test_no_other_batch_size_for_a_net_that_fixes_it():
    net = keras.Sequential([keras.Input((256,)), Fixed(), LAYERS.Dense(1)])
    net.compile("sgd", "mse", jit_compile=False)
    found = estimate(net, (np.zeros((32, 256)), np.zeros((32, 1))))
    with pytest.raises(UnsupportedError, match=r"Expected a model that takes batches of any size.*but not"):
        found.largest_batch(1000)


def test_the_text_fits_80_columns_and_names_the_largest_layers():
    long = "a_layer_with_a_name_that_is_longer_than_any_that_keras_gives_and_does_not_fit"
    net = keras.Sequential([keras.Input((256,)), *(LAYERS.Dense(WIDTH, "relu", name=f"{long}_{n}") for n in range(16))])
    net.compile("sgd", "mse", jit_compile=False)
    found = estimate(net, (np.zeros((64, 256)), np.zeros((64, WIDTH))))
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("A training step on 64 examples takes ")
    assert f"in all       {found.total_mib:.1f} MiB" in str(found)
    assert any(line.strip().startswith("…") and f"_{n}" in line for n in range(16) for line in lines)
    assert any("more" in line for line in lines[-1:])


@pytest.mark.slow
def test_json_and_page(tmp_path):
    found = estimate(dense_net(), specs())
    values = json.loads(json.dumps(found.to_dict()))
    assert values["total_mib"] == found.total_mib
    assert values["by_layer"][0] == {"path": found.by_layer[0].path, "mib": found.by_layer[0].mib}
    page = found.to_html(tmp_path / "memory.html").read_text()
    assert page.count("<svg") > 10
    assert "prefers-color-scheme: dark" in page
    assert all(text in page for text in ("dense_3", "workspace", f"{found.total_mib:,.1f} MiB"))


@pytest.mark.parametrize("given", [64, np.int64(64), None, (), [1, 2], tf.data.Dataset.range(3), "batch", (1, 2)])
def test_a_batch_is_data_or_specs(given):
    with pytest.raises(TypeError, match=r"Expected .*Received: .*(Pass one batch of data, not its size|Convert it)"):
        estimate(dense_net(), given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (specs(width=17), r"Expected a batch that 'net' can train on\. Received: .*17.*which fails: .*Pass a batch"),
        (specs(None), r"Expected a batch whose sizes are all known\. Received: .*None.*Give specs"),
        (specs(0), r"Expected a batch of at least one example\. Received: .*Pass arrays"),
        ((np.float32(1), None), r"Expected arrays, tensors or specs"),
    ],
)
def test_a_batch_that_does_not_fit(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        estimate(dense_net(), given)


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = LAYERS.Dense(1)

    def call(self, x):
        return self.dense(x)


def test_models_that_cannot_be_estimated():
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        estimate("net", specs())
    with pytest.raises(ValueError, match="Expected a compiled model"):
        estimate(keras.Sequential([keras.Input((256,)), LAYERS.Dense(1)]), specs())
    unbuilt = Unbuilt()
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"Expected a built model.*Received: .*not built\. Call it on a batch first"):
        estimate(unbuilt, specs())
    eager = dense_net()
    eager.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(UnsupportedError, match=r"Expected a model that trains in a graph.*run_eagerly=False"):
        estimate(eager, specs())


def test_a_step_that_xla_cannot_compile():
    def printed(x):
        tf.print(x)
        return x

    net = keras.Sequential([keras.Input((256,)), LAYERS.Lambda(printed), LAYERS.Dense(1)], name="net")
    net.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(
        UnsupportedError, match=r"Expected a step that XLA compiles, as 'net'.*Found: .*(PrintV2|StringFormat)"
    ):
        estimate(net, (np.zeros((32, 256)), np.zeros((32, 1))))


def test_one_device_only(monkeypatch):
    net = dense_net()
    monkeypatch.setattr(net, "_distribute_strategy", SimpleNamespace(num_replicas_in_sync=2))
    with pytest.raises(UnsupportedError, match=r"Expected a model on one device\. Found: 'net' trains on 2 replicas"):
        estimate(net, specs())


@pytest.mark.parametrize("limit_mib", [1e9, 1e15])
def test_a_limit_without_bound_gives_the_largest_batch_of_all(limit_mib):
    net = dense_net(depth=1)
    assert estimate(net, specs(32)).largest_batch(limit_mib) == 2**24
