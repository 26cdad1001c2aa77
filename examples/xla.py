"""Trains a small net with XLA if it pays: shows what prevents it, whether it pays here, and what is compiled.

Run it as it is: `python examples/xla.py`. It needs scikit-learn: `pip install '.[bench]'`.
"""

import keras
from sklearn.datasets import load_digits

import tfopt
from tfopt.callbacks import CompilationLogger
from tfopt.pipelines import build_pipeline

EPOCHS = 5

digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target.astype("int32")
# Batches of one shape: XLA would compile again for a smaller last one.
dataset = build_pipeline((x, y), batch_size=64, seed=0, remainder="drop")

keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(256, activation="relu") for _ in range(3)]
model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])

# Can XLA compile it? This compiles and runs nothing.
print(tfopt.xla.explain(model, dataset))

# Does it pay here, for this number of steps?
decision = tfopt.xla.decide(model, dataset, planned_steps=EPOCHS * len(dataset))
print(decision)
decision.apply(model)

history = model.fit(
    dataset,
    epochs=EPOCHS,
    callbacks=[CompilationLogger()],
    verbose=2,
)
print(f"compilations in each epoch: {history.history['xla_compilations']}")
