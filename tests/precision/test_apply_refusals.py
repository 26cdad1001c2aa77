import keras
import numpy as np
import pytest
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.precision import apply, apply_policy, check

layers = keras.layers
X, Y = np.full((8, 4), 0.1, "float32"), np.full((8, 2), 0.1, "float32")  # small: nothing overflows at the first scale


def net(optimizer="sgd", **options):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="one"), layers.Dense(2, name="head")], name="net")
    if optimizer is not None:
        model.compile(optimizer, "mse", jit_compile=False, **options)
    return model


@pytest.mark.slow
def test_layers_that_another_compiled_model_trains():
    encoder = net(None)
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, layers.Dense(2, name="top")(encoder(inputs)), name="outer")
    outer.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="Found 'one', which 'outer' has too"):
        apply(encoder, "mixed_float16")
    assert encoder.layers[0].compute_dtype == "float32"
    assert apply(outer, {"net/one": "mixed_float16"}).loss_scaled
    del outer  # what is left of it is no hindrance
    assert apply(encoder, "float32").changed == {"one": "float32"}


def test_a_compiled_model_inside_is_scaled_too():
    inner = net()
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, layers.Dense(2)(inner(inputs)))
    outer.compile("sgd", "mse")
    apply(outer, "mixed_float16")
    assert isinstance(inner.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.slow
@pytest.mark.parametrize("hook", first_quick(["on_train_batch_end", "on_train_begin", "on_epoch_end", "on_test_begin"]))
def test_inside_of_fit(hook):
    model = net()
    callback = keras.callbacks.Callback()
    setattr(callback, hook, lambda *_, **__: apply(model, "mixed_float16"))
    model.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), callbacks=[callback], verbose=0)
    assert model.layers[0].compute_dtype == "float16"
    assert model.optimizer.inner_optimizer.iterations.numpy() == 4
    model.predict(X, verbose=0)


@pytest.mark.parametrize("model", [None, 3, [net(None)], layers.Dense(3)])
def test_no_model(model):
    with pytest.raises(TypeError, match=r"Expected a keras\.Model\. Received: .*Pass the model itself"):
        apply(model, "mixed_bfloat16")


@pytest.mark.parametrize("key", [None, 3])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float8"])
def test_a_key_that_is_no_text(key, policy):
    model = keras.Sequential([layers.Dense(4), layers.Dense(2)])  # not built: Keras' paths are None
    with pytest.raises(TypeError, match=f"Expected paths or names .* Received: {key}"):
        apply(model, {key: policy})


def test_a_constant_loss_scale_comes_back():
    model = net(keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    apply(model, "mixed_float16")
    assert model.optimizer.inner_optimizer.loss_scale_factor is None
    apply(model, "float32")
    assert model.optimizer.loss_scale_factor == 8.0


def deep(input_dtype="float16"):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), dtype=input_dtype)
    x = layers.Dense(4, name="two", activation="tanh")(layers.Dense(4, name="one")(inputs))
    model = keras.Model(inputs, layers.Dense(2, name="head")(x), name="net")
    model.compile(keras.optimizers.Adam(0.1, loss_scale_factor=2.0), "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    return model


def state_of(model):
    held = [*model._flatten_layers(), model.optimizer]
    attributes = {(part, name): value for part in held for name, value in vars(part).items()}
    lists = {key: len(value) for key, value in attributes.items() if isinstance(value, (list, dict, set))}
    options = model._compile_config.config["optimizer"], model.layers[0].output.dtype
    return attributes, lists, options, [(one.path, one.trainable) for one in model.variables]


def same_state(before, now):
    (was, *others), (has, *others_now) = before, now
    return was.keys() == has.keys() and all(has[key] is was[key] for key in was) and others == others_now


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (apply_policy, "set_policies"),
        (apply_policy, "quantize"),
        (apply_policy, "replace_optimizer"),
        (apply_policy, "_keep_in_config"),
        (apply_policy, "scale_loss"),
        (apply_policy, "rebuild_step_function"),
        (layers.Dense, "quantized_build"),
        (keras.optimizers.LossScaleOptimizer, "build"),
    ],
)
def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch, holder, name, first):
    model, untouched = deep(), deep()
    before, real, counted = state_of(model), getattr(holder, name), []

    def failing(*args, **options):
        counted.append(1)
        if first and len(counted) == 1 + (holder is layers.Dense):  # the second layer of two
            raise KeyboardInterrupt
        real(*args, **options)
        if not first:
            raise KeyboardInterrupt

    monkeypatch.setattr(holder, name, failing)
    with pytest.raises(KeyboardInterrupt):
        apply(model, "float8_from_mixed_float16")
    monkeypatch.undo()
    assert same_state(before, state_of(model))
    for one in (model, untouched):
        one.fit(X, Y, verbose=0)
    for mine, its in zip(model.variables, untouched.variables, strict=True):
        assert mine.numpy().tobytes() == its.numpy().tobytes()
    assert apply(model, "float8_from_mixed_float16").changed.keys() == {"one", "two"}


@pytest.mark.parametrize("verb", [apply, lambda model, policy: check(model, (X, Y), policy)])
def test_float8_names_the_layers_with_lora(verb):
    model = deep("float32")
    model.get_layer("two").enable_lora(2)
    before = state_of(model)
    with pytest.raises(UnsupportedError, match=r"layers without LoRA to quantize .* Found: two\. Name the layers"):
        verb(model, {"net": "float8_from_mixed_bfloat16"})
    assert same_state(before, state_of(model))
    assert apply(model, {"one": "float8"}).changed == {"one": "float8_from_float32"}


class Adversarial(keras.Model):
    def __init__(self):
        super().__init__(name="gan")
        self.generator, self.discriminator = net(None), net(None)

    def compile(self, g_optimizer, d_optimizer):
        super().compile()  # with Keras' default optimizer, which nothing uses
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

    def call(self, inputs):
        return self.generator(inputs)


def test_what_is_said_of_each_optimizer():
    model = Adversarial()
    model(X)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), keras.optimizers.Adam())
    wanted = {"'optimizer' of 'gan'": True, "'g_optimizer' of 'gan'": True, "'d_optimizer' of 'gan'": False}
    applied = apply(model, "mixed_float16")
    assert applied.scaling == wanted
    assert applied.loss_scaled is False
    assert "scaled by 'optimizer' of 'gan', 'g_optimizer' of 'gan', but not by 'd_optimizer' of 'gan'" in str(applied)
    model.d_optimizer = model.optimizer.inner_optimizer  # gets its gradients from the wrapper
    assert apply(model, "mixed_float16").loss_scaled is True
    model.compile(keras.optimizers.SGD(), keras.optimizers.SGD())
    assert "the loss is not scaled" in str(apply(model, "float32"))
