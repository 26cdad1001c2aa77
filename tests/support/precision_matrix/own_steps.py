"""Models with a train_step of their own, and how they scale the loss."""

import keras
import tensorflow as tf

from precision_matrix.nets import cross_entropy, of_rows, rows
from tfopt import repairs

layers, ops = keras.layers, keras.ops
Scaling = keras.optimizers.LossScaleOptimizer


class Faint(layers.Layer):
    """Hands on a small part of the gradient: without a scaled loss, float16 has nothing left of it."""

    def __init__(self, share=1e-6, **options):
        super().__init__(**options)
        self.share = share

    def call(self, x):
        return tf.custom_gradient(lambda x: (tf.identity(x), lambda gradient: gradient * self.share))(x)


def faint_body(x):
    return Faint()(layers.Dense(16, activation="relu", name="body")(x))


def faint(**options):
    def make():
        repairs.install(*repairs.FLOAT16)  # keeps auto_scale_loss, which Keras forgets
        return of_rows(faint_body, **options)

    return make


class Own(keras.Model):
    """A train_step as in Keras' guide, with the loss scaled in one of several ways."""

    scaled = "scaled"

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            scaled = loss
            if self.scaled in ("scaled", "clipped"):
                scaled = self.optimizer.scale_loss(loss)
            elif self.scaled == "dropped":
                self.optimizer.scale_loss(loss)
            elif self.scaled == "by hand":
                scaled = loss * self.optimizer.dynamic_scale
            elif self.scaled == "by a constant":
                scaled = loss * 1024.0
        gradients = tape.gradient(scaled, self.trainable_variables)
        if self.scaled == "by a constant":
            gradients = [gradient / 1024.0 for gradient in gradients]
        if self.scaled == "clipped":
            gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own(scaled, body=faint_body, **options):
    """With a LossScaleOptimizer, unless options say otherwise."""

    def make():
        repairs.install(*repairs.FLOAT16)

        def kind(*arguments, **options):
            model = Own(*arguments, **options)
            model.scaled = scaled
            return model

        given = options.get("optimizer", lambda: Scaling(keras.optimizers.Adam(3e-3)))
        model, data = of_rows(body, kind=kind, optimizer=given(), auto_scale_loss=False)
        model.optimizer.build(model.trainable_variables)  # which makes the scale
        return model, data

    return make


def healthy_body(x):
    return layers.Dense(16, activation="relu")(x)


class Gan(keras.Model):
    """As in Keras' guide: two networks, two optimizers, and no call."""

    def __init__(self, between):
        super().__init__(name="net")
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(16, "relu", name="hidden"), between(), layers.Dense(8, dtype="float32")],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "relu", name="seen"), layers.Dense(1, dtype="float32")],
            name="discriminator",
        )
        self.seed = keras.random.SeedGenerator(1)
        self.judged = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, make_optimizer):
        super().compile()
        self.of_generator, self.of_discriminator = make_optimizer(), make_optimizer()

    def _train(self, optimizer, loss_of, variables):
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled = optimizer.scale_loss(loss)
        optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    def train_step(self, real):
        real = real[0] if isinstance(real, tuple) else real
        count = tf.shape(real)[0]
        fake = self.generator(keras.random.normal((count, 4), seed=self.seed))
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], 0)

        def discriminating():
            both = tf.concat([real, tf.cast(fake, real.dtype)], 0)
            return self.judged(labels, self.discriminator(both, training=True))

        noise = keras.random.normal((count, 4), seed=self.seed)

        def generating():
            return self.judged(tf.ones((count, 1)), self.discriminator(self.generator(noise, training=True)))

        one = self._train(self.of_discriminator, discriminating, self.discriminator.trainable_variables)
        other = self._train(self.of_generator, generating, self.generator.trainable_variables)
        return {"discriminator": one, "generator": other}


def gan(make_optimizer=lambda: keras.optimizers.Adam(1e-3), between=layers.Identity):
    def make():
        model = Gan(between)
        model.compile(make_optimizer)
        x, _ = rows()
        return model, (x,)

    return make


def scaling_gan():
    return gan(lambda: Scaling(keras.optimizers.Adam(1e-3)))()


def faint_gan(*, scaled):
    adam = keras.optimizers.Adam
    return gan((lambda: Scaling(adam(1e-3))) if scaled else adam, lambda: Faint(1e-7))


class Contrastive(keras.Model):
    """Two noisy views of each row are to be alike, and unlike all others; labels do not count."""

    def __init__(self):
        super().__init__(name="net")
        self.tower = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(8), layers.UnitNormalization()])
        self.noise = layers.GaussianNoise(0.2, seed=1)

    def call(self, x, training=False):
        return ops.cast(self.tower(self.noise(x, training=training), training=training), "float32")

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            one, two = self(x, training=True), self(x, training=True)
            scores = tf.matmul(one, two, transpose_b=True) / 0.1
            loss = tf.reduce_mean(cross_entropy()(tf.range(tf.shape(x)[0]), scores))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return {"loss": loss}


def contrastive():
    model = Contrastive()
    model.compile(Scaling(keras.optimizers.Adam(3e-3)), auto_scale_loss=False)
    x, y = rows()
    model(x[:1])
    return model, (x, y)


class Penalty(keras.Model):
    """A gradient of a gradient, as in Wasserstein GANs."""

    def train_step(self, data):
        x, y = data
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            slope = inner.gradient(outputs, x)
            loss = self.compute_loss(y=y, y_pred=outputs) + 0.01 * tf.reduce_mean(tf.cast(slope, "float32") ** 2)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return {"loss": loss}


def penalty():
    return of_rows(
        lambda x: layers.Dense(16, "tanh")(x),
        kind=Penalty,
        optimizer=Scaling(keras.optimizers.Adam(3e-3)),
        auto_scale_loss=False,
    )
