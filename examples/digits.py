"""Trains a small net on scikit-learn's handwritten digits, to over 95 %, with tfopt's pipeline, policy and loggers.

Run it as it is: `python examples/digits.py [LOG_FOLDER]`. It needs scikit-learn: `pip install '.[bench]'`.
"""

import sys

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfopt
from tfopt.callbacks import ThroughputLogger, UtilizationLogger
from tfopt.pipelines import build_pipeline, plan_pipeline

LOGS = sys.argv[1] if len(sys.argv) > 1 else "digits-logs"

digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
x, x_test, y, y_test = train_test_split(images, digits.target.astype("int32"), test_size=0.2, random_state=0)

print(tfopt.precision.recommend())
tfopt.precision.set_policy("auto")
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, dtype="float32"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

plan = plan_pipeline((x, y), batch_size=64, seed=0)
print(plan)
dataset = plan.build()

# Does XLA pay for this model here?
decision = tfopt.xla.decide(model, dataset)
print(decision)
decision.apply(model)

model.fit(
    dataset,
    epochs=10,
    validation_data=build_pipeline((x_test, y_test), batch_size=64, training=False),
    callbacks=[UtilizationLogger(LOGS, interval_seconds=0.5), ThroughputLogger(LOGS, window_steps=20)],
    verbose=2,
)
accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
print(f"test accuracy {accuracy:.1%}; logs in {LOGS}: utilization.csv, throughput.csv (and .jsonl)")
if accuracy <= 0.95:
    sys.exit("expected over 95 %")
