import keras
import numpy as np
import pytest
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.precision import apply

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
