"""A BERT classifier of KerasHub, small and from random weights, fine-tuned on a dataset of padded sentences."""

import keras
import keras_hub
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(0)
lengths = np.random.randint(10, 64, size=1_200)
features = {
    "token_ids": np.random.randint(1, 5_000, size=(1_200, 64)),
    "segment_ids": np.zeros((1_200, 64), "int32"),
    "padding_mask": (np.arange(64) < lengths[:, None]).astype("int32"),
}
labels = np.random.randint(0, 2, size=1_200)

backbone = keras_hub.models.BertBackbone(
    vocabulary_size=5_000, num_layers=2, num_heads=4, hidden_dim=128, intermediate_dim=512, max_sequence_length=64
)
classifier = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
classifier.compile(
    optimizer=keras.optimizers.AdamW(5e-5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
dataset = tf.data.Dataset.from_tensor_slices((features, labels)).shuffle(1_200, seed=0).batch(16)
classifier.fit(dataset, epochs=2)
