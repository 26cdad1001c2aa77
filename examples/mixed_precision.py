"""Switches a float32 net to mixed precision, after checking layer by layer that it computes the same.

Run it as it is: `python examples/mixed_precision.py [LOG_FOLDER]`. It needs scikit-learn: `pip install '.[bench]'`.
"""

import sys

import keras
from sklearn.datasets import load_digits

import tfopt
from tfopt.callbacks import LossScaleLogger, PrecisionMonitor
from tfopt.pipelines import build_pipeline

LOGS = sys.argv[1] if len(sys.argv) > 1 else "mixed-precision-logs"

digits = load_digits()
x, y = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int32")
dataset = build_pipeline((x, y), batch_size=64, seed=0, remainder="drop")

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

recommendation = tfopt.precision.recommend()
print(recommendation)
# If float32 is recommended, as on a CPU, use float16 to show the check; it is no faster there.
policy = recommendation.policy if recommendation.policy != "float32" else "mixed_float16"

# Does it compute the same from the same weights, forward and backward?
report = tfopt.precision.check(model, dataset, policy)
print(report)
if not report.passed and report.fallback is None:
    sys.exit(f"{policy} does not suit this model: train it in float32.")

# The check names the layers to keep in float32, if any.
print(tfopt.precision.apply(model, policy if report.passed else report.fallback))
# Errors may grow in training: compare with float32 now and then.
monitor = PrecisionMonitor((x[:64], y[:64]), every_steps=50)
scale = [LossScaleLogger(LOGS)] if policy == "mixed_float16" else []  # bfloat16 needs no loss scale
model.fit(dataset, epochs=5, callbacks=[monitor, *scale], verbose=2)
print(monitor)
