"""A PyDataset that opens photographs with PIL, flips some, and feeds a small net."""

import tempfile
from pathlib import Path

import keras
import numpy as np
from PIL import Image

COUNT, CLASSES, SIZE = 960, 5, 96
folder = Path(tempfile.mkdtemp())
random = np.random.default_rng(0)
for number in range(COUNT):
    picture = random.integers(0, 256, size=(12, 16, 3), dtype="uint8")
    Image.fromarray(picture).resize((320, 240)).save(folder / f"{number:04}-{number % CLASSES}.jpg")


class Photos(keras.utils.PyDataset):
    def __init__(self, paths, batch_size, **options):
        super().__init__(**options)
        self.paths, self.batch_size = paths, batch_size

    def __len__(self):
        return len(self.paths) // self.batch_size

    def __getitem__(self, number):
        paths = self.paths[number * self.batch_size : (number + 1) * self.batch_size]
        return np.stack([self.load(path) for path in paths]), np.array([int(path.stem[-1]) for path in paths])

    def load(self, path):
        picture = np.asarray(Image.open(path).resize((SIZE, SIZE)), "float32") / 255
        return picture[:, ::-1] if random.random() < 0.5 else picture


keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((SIZE, SIZE, 3))])
for filters in (16, 32, 64):
    model.add(keras.layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False))
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.Activation("relu"))
model.add(keras.layers.GlobalAveragePooling2D())
model.add(keras.layers.Dense(CLASSES))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(Photos(sorted(folder.glob("*.jpg")), 16), epochs=2)
