"""Trains a small network on the columns of a Parquet file: numbers to scale, and a label.

Run it as it is: `python examples/table.py`. The file holds scikit-learn's measurements of 569 tumours, in a temporary
folder.
"""

import tempfile
from pathlib import Path

import keras
import tensorflow as tf
from sklearn.datasets import load_breast_cancer

from tfopt.pipelines import plan_pipeline, table

LABEL = "target"  # 0 for malignant, 1 for benign

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "tumours.parquet"
    load_breast_cancer(as_frame=True).frame.to_parquet(path)
    rows = table(path, label=LABEL)

    def to_vector(columns, label):
        return tf.cast(tf.stack(list(columns.values())), tf.float32), label

    # Both plans split the rows alike: what is held out is never trained on.
    options = {"transform": to_vector, "batch_size": 32, "split": 0.2}
    train = plan_pipeline(rows, seed=0, remainder="keep", **options)
    held_out = plan_pipeline(rows, training=False, **options)
    print(train)

    keras.utils.set_random_seed(0)
    scale = keras.layers.Normalization()
    scale.adapt(train.build().map(lambda vectors, labels: vectors))
    model = keras.Sequential(
        [scale, keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
    )
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    model.fit(train.build(), epochs=10, validation_data=held_out.build(), verbose=2)
    found = model.evaluate(held_out.build(), verbose=0, return_dict=True)
print(f"{found['accuracy']:.1%} of the tumours held out are classified correctly")
