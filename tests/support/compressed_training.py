"""Trains on two logical devices with gradients summed in 32 and in 16 bits, and prints the outcomes."""

import json
import warnings

import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

import keras  # noqa: E402
import numpy as np  # noqa: E402

from tfopt import distribute, repairs  # noqa: E402


def trained(strategy, dtype, embedded=False, **options):
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 6)).astype("float32"), random.normal(size=(64, 2)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
        if embedded:
            x = np.arange(x.size, dtype="int32").reshape(x.shape) % 5
            model = keras.Sequential([keras.Input((6,), dtype="int32"), keras.layers.Embedding(9, 4)])
            model.add(keras.layers.Flatten())
            model.add(keras.layers.Dense(2))
        model.compile(keras.optimizers.SGD(0.1, **options), "mse", jit_compile=False)
    seen = []
    reduce = tf.distribute.ReplicaContext.all_reduce

    def noting(self, op, value, options=None):
        seen.extend(leaf.dtype.name for leaf in tf.nest.flatten(value) if leaf.shape.rank)
        return reduce(self, op, value, options)

    if dtype:
        assert distribute.compress_gradients(model, dtype) is model
    tf.distribute.ReplicaContext.all_reduce = noting
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)
    history = model.fit(dataset, epochs=5, verbose=0).history["loss"]
    tf.distribute.ReplicaContext.all_reduce = reduce
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return {"weights": weights.tolist(), "loss": history, "sent": sorted(set(seen))}


warnings.simplefilter("ignore")
strategy = distribute.strategy("auto")
found = {
    str(dtype): {"plain": trained(strategy, dtype), "clipped": trained(strategy, dtype, global_clipnorm=0.05)}
    for dtype in (None, "bfloat16", "float16")
}
found["rows"] = {
    name: trained(strategy, dtype, embedded=True, global_clipnorm=0.05)
    for name, dtype in (("long", None), ("short", "bfloat16"))
}
found["one device"] = {"plain": trained(tf.distribute.get_strategy(), "bfloat16")}
found["explain"] = distribute.explain()
found["again"] = distribute.strategy() is strategy
found["repaired"] = [name for name in repairs.REPLICAS if repairs.REPAIRS[name].installed]
print(json.dumps(found))
