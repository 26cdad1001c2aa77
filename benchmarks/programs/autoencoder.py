"""A variational autoencoder with a train_step of its own."""

import keras
import numpy as np
import tensorflow as tf

WIDTH = 16


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
                keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(2 * WIDTH),
            ]
        )
        self.decoder = keras.Sequential(
            [
                keras.layers.Dense(7 * 7 * 32, activation="relu"),
                keras.layers.Reshape((7, 7, 32)),
                keras.layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu"),
                keras.layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid"),
            ]
        )
        self.noise = keras.random.SeedGenerator(0)
        self.total = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.total]

    def call(self, images):
        mean, log_variance = tf.split(self.encoder(images), 2, axis=-1)
        drawn = mean + tf.exp(log_variance / 2) * keras.random.normal(tf.shape(mean), seed=self.noise)
        return self.decoder(drawn), mean, log_variance

    def train_step(self, images):
        with tf.GradientTape() as tape:
            made, mean, log_variance = self(images)
            each = keras.losses.binary_crossentropy(images, made)
            kept = -0.5 * tf.reduce_sum(1 + log_variance - mean**2 - tf.exp(log_variance), axis=-1)
            loss = tf.reduce_mean(tf.reduce_sum(each, axis=(1, 2)) + kept)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        return {"loss": self.total.result()}


keras.utils.set_random_seed(0)
images = np.random.rand(6_000, 28, 28, 1).astype("float32")
model = Autoencoder()
model.compile(optimizer="adam")
model.fit(images, batch_size=64, epochs=2)
