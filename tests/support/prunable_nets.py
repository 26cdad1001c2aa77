"""Small nets of every kind that pruning knows, by name, with random weights wherever a mistake could hide."""

import keras
import numpy as np

_L = keras.layers
NETS = {}


def net(function):
    NETS[function.__name__] = function
    return function


def randomized(model, seed=0):
    """Random biases and statistics too: zeros and ones would hide wrong channels."""
    random = np.random.default_rng(seed)
    for weight in model.weights:
        if "seed" in weight.path:
            continue
        positive = any(name in weight.path for name in ("gamma", "variance"))
        value = random.uniform(0.5, 1.5, weight.shape) if positive else random.normal(0, 0.4, weight.shape)
        weight.assign(value)
    return model


def inputs_of(model, examples=3, seed=1):
    """Inputs, as the model takes them."""
    random = np.random.default_rng(seed)

    def one(tensor):
        shape = (examples, *(5 if size is None else size for size in tensor.shape[1:]))
        if "int" in tensor.dtype:
            return random.integers(0, 7, shape).astype("int32")
        return random.normal(size=shape).astype("float32")

    single = isinstance(model, keras.Sequential)
    return keras.tree.map_structure(one, model.inputs[0] if single else model.input)


def conv_block(x, filters, kernel=3, strides=1, **options):
    x = _L.Conv2D(filters, kernel, strides, padding="same", use_bias=False, **options)(x)
    return _L.ReLU()(_L.BatchNormalization()(x))


@net
def mlp():
    x = keras.Input((6,))
    y = _L.Dense(12, activation="relu", name="first")(x)
    y = _L.PReLU()(_L.Dense(10, name="second")(y))
    y = _L.Dense(8, activation="sigmoid", name="third")(_L.Dropout(0.0)(y))
    return keras.Model(x, _L.Dense(3, name="logits")(y))


@net
def vgg():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            _L.Conv2D(8, 3, activation="relu", name="one"),
            _L.MaxPooling2D(),
            _L.ZeroPadding2D(),
            _L.Conv2D(12, 3, activation="gelu", name="two"),
            _L.Flatten(),
            _L.BatchNormalization(),
            _L.Dense(16, activation="tanh", name="three"),
            _L.Dense(4, name="logits"),
        ]
    )


@net
def sequential_without_input():
    model = keras.Sequential([_L.Dense(8, name="first"), _L.BatchNormalization(), _L.Dense(2, name="logits")])
    model(np.zeros((2, 5), "float32"))
    return model


@net
def resnet():
    x = keras.Input((8, 8, 3))
    y = conv_block(x, 8, name="stem")
    identity = _L.BatchNormalization()(_L.Conv2D(8, 3, padding="same", name="same")(conv_block(y, 6)))
    y = _L.ReLU()(_L.Add()([y, identity]))
    projected = _L.Conv2D(16, 1, 2, name="projection")(y)
    y = _L.Add()([projected, _L.Conv2D(16, 3, padding="same", name="down")(conv_block(y, 6, strides=2))])
    y = _L.Activation("swish")(y) * 0.5
    return keras.Model(x, _L.Dense(3, name="logits")(_L.GlobalAveragePooling2D()(y)))


@net
def densenet():
    x = keras.Input((6, 6, 3))
    y = _L.Conv2D(6, 3, padding="same", name="stem")(x)
    for _ in range(3):
        z = conv_block(_L.Activation("relu")(_L.BatchNormalization()(y)), 8, 1)
        y = _L.Concatenate()([y, _L.Conv2D(4, 3, padding="same")(z)])
    return keras.Model(x, _L.Dense(3, name="logits")(_L.GlobalMaxPooling2D()(y)))


@net
def mobilenet():
    x = keras.Input((8, 8, 3))
    y = conv_block(x, 8, strides=2, name="stem")
    z = _L.Conv2D(16, 1, name="expand")(y)
    z = _L.ReLU(6.0)(_L.BatchNormalization()(z))
    z = _L.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(z)
    z = _L.BatchNormalization()(z)
    gate = _L.GlobalAveragePooling2D(keepdims=True)(z)
    gate = _L.Conv2D(4, 1, activation="relu", name="squeeze")(gate)
    gate = _L.Conv2D(32, 1, activation="hard_sigmoid", name="excite")(gate)
    z = _L.Multiply()([z, gate])
    y = _L.Add()([y, _L.Conv2D(8, 1, name="project")(z)])
    y = _L.SeparableConv2D(10, 3, depth_multiplier=2, name="separable")(y)
    return keras.Model(x, _L.Dense(3, name="logits")(_L.GlobalAveragePooling2D()(y)))


@net
def squeezed():
    """A gate with Reshape, as in EfficientNet, and one channel that is broadcast."""
    x = keras.Input((4, 4, 3))
    y = _L.Conv2D(8, 3, padding="same", name="stem")(x)
    gate = _L.Reshape((1, 1, 8))(_L.GlobalAveragePooling2D()(y))
    y = _L.Multiply()([y, _L.Conv2D(8, 1, activation="sigmoid", name="gate")(gate)])
    y = _L.Multiply()([y, _L.Conv2D(1, 1, activation="sigmoid", name="places")(y)])
    return keras.Model(x, _L.Dense(3, name="logits")(_L.Flatten()(y)))


@net
def grouped():
    x = keras.Input((6, 6, 3))
    y = _L.Conv2D(8, 1, name="wide")(x)
    y = _L.Conv2D(12, 3, groups=4, activation="relu", name="groups")(y)
    y = _L.Conv2D(12, 3, groups=12, name="each")(y)
    return keras.Model(x, _L.Dense(3, name="logits")(_L.Flatten()(y)))


@net
def inception():
    x = keras.Input((6, 6, 3))
    y = _L.Conv2D(6, 1, name="stem")(x)
    branches = [
        _L.Conv2D(4, 1, name="one")(y),
        _L.Conv2D(6, 3, padding="same", name="three")(_L.Conv2D(4, 1, name="reduce")(y)),
        _L.AveragePooling2D(3, 1, padding="same")(y),
        x,
    ]
    y = _L.Conv2D(8, 3, name="mix")(_L.Concatenate()(branches))
    return keras.Model(x, _L.Dense(3, name="logits")(_L.Flatten()(y)))


@net
def unet():
    x = keras.Input((8, 8, 2))
    high = conv_block(x, 6, name="down")
    low = conv_block(_L.MaxPooling2D()(high), 8, name="bottom")
    up = _L.Conv2DTranspose(6, 2, 2, name="up")(low)
    y = conv_block(_L.Concatenate()([high, up, _L.UpSampling2D()(low)]), 6, name="merge")
    return keras.Model(x, _L.Conv2D(2, 1, name="logits")(y))


def transformer_block(x, attention, width, **options):
    x = _L.Add()([x, attention(*[_L.LayerNormalization()(x)] * 2, **options)])
    y = _L.Dense(12, activation="gelu", name=f"{attention.name}_mlp")(_L.LayerNormalization()(x))
    return _L.Add()([x, _L.Dense(width, name=f"{attention.name}_out")(y)])


@net
def vit():
    x = keras.Input((8, 8, 3))
    y = _L.Reshape((4, 8))(_L.Conv2D(8, 4, 4, name="patches")(x))
    y = transformer_block(y, _L.MultiHeadAttention(4, 3, name="attention"), 8)
    y = transformer_block(y, _L.MultiHeadAttention(2, 3, value_dim=5, use_bias=False, name="second"), 8)
    return keras.Model(x, _L.Dense(3, name="logits")(_L.GlobalAveragePooling1D()(_L.LayerNormalization()(y))))


@net
def text():
    x = keras.Input((None,), dtype="int32")
    y = _L.Embedding(7, 8, name="words")(x)
    y = transformer_block(y, _L.GroupQueryAttention(3, 6, 3, name="grouped"), 8, use_causal_mask=True)
    y = transformer_block(y, _L.GroupQueryAttention(3, 4, 1, name="one_key"), 8)
    return keras.Model(x, _L.Dense(5, name="logits")(y))


@net
def attention_without_norm():
    """Heads, their inputs and their outputs are cut."""
    x = keras.Input((5, 6))
    y = _L.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d", activation="relu", name="wide")(x)
    y = _L.GroupQueryAttention(2, 4, 2, name="grouped")(y, y)
    y = _L.MultiHeadAttention(4, 2, output_shape=10, name="cross")(y, _L.Dense(8, name="memory")(x))
    return keras.Model(x, _L.Dense(3, name="logits")(y))


@net
def embedded():
    x = keras.Input((5,), dtype="int32")
    y = _L.Conv1D(6, 3, name="window")(_L.SpatialDropout1D(0.0)(_L.Embedding(7, 8, name="words")(x)))
    y = _L.Permute((2, 1))(_L.MaxPooling1D(3)(y))
    return keras.Model(x, _L.Dense(3, name="logits")(_L.Flatten()(y)))


@net
def two_ways():
    """Several inputs and outputs, as dicts."""
    image, number = keras.Input((6, 6, 3), name="image"), keras.Input((4,), name="number")
    y = _L.GlobalAveragePooling2D()(_L.Conv2D(8, 3, name="see")(image))
    y = _L.Add()([_L.Dense(6, name="left")(y), _L.Dense(6, name="right")(number)])
    y = keras.ops.concatenate([keras.ops.tanh(y) + keras.ops.relu(y), number, 2.0 * y], axis=-1)
    outputs = {"kind": _L.Dense(3, name="kind")(y), "size": _L.Dense(1, name="size")(_L.Dense(5, name="deep")(y))}
    return keras.Model({"image": image, "number": number}, outputs)


@net
def nested():
    inner_input = keras.Input((8,))
    y = _L.Dense(10, activation="relu", name="hidden")(inner_input)
    inner = keras.Model(inner_input, _L.Dense(8, name="back")(y), name="inner")
    tail = keras.Sequential([_L.Dense(6, activation="relu", name="a"), _L.Dense(4, name="b")], name="tail")
    x = keras.Input((5,))
    y = _L.Dense(8, name="before")(x)
    y = _L.Add()([y, inner(y)])
    return keras.Model(x, _L.Dense(2, name="logits")(tail(inner(y))))


@net
def shared():
    """Layers that are called twice: on the same channels, and on those of different layers."""
    one, two = keras.Input((5,)), keras.Input((5,))
    tower = _L.Dense(8, activation="relu", name="tower")
    norm = _L.BatchNormalization(name="norm")
    head = _L.Dense(6, name="head")
    a, b = norm(tower(one)), norm(tower(two))
    y = _L.Concatenate()([head(a), head(b), head(_L.Dense(8, name="other")(one))])
    return keras.Model([one, two], _L.Dense(2, name="logits")(y))


@net
def channels_first():
    """A CPU has no such convolutions, so only what lies around them."""
    x = keras.Input((12,))
    y = _L.Permute((3, 1, 2))(_L.Dense(6, name="grid")(_L.Reshape((2, 2, 3))(x)))
    y = _L.BatchNormalization(axis=1)(_L.AveragePooling2D(1, data_format="channels_first")(y))
    y = _L.Flatten(data_format="channels_first")(_L.UpSampling2D(2, data_format="channels_first")(y))
    return keras.Model(x, _L.Dense(3, name="logits")(y))


@net
def generator():
    x = keras.Input((4,))
    y = _L.Reshape((3, 3, 6))(_L.Dense(54, name="grid")(x))
    y = _L.Conv2DTranspose(8, 3, 2, activation="relu", name="up")(y)
    return keras.Model(x, _L.Conv2D(1, 3, name="image")(y))
