"""A small convolutional net on arrays of handwritten-digit size, with a validation split."""

import keras
import numpy as np

keras.utils.set_random_seed(0)
x = np.random.randint(0, 256, size=(12_000, 28, 28, 1)).astype("float32") / 255
y = keras.utils.to_categorical(np.random.randint(0, 10, size=12_000), 10)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x, y, batch_size=128, epochs=5, validation_split=0.1)
