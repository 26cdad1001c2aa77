"""Models of images, series and noise: of KerasHub, of keras.applications, and from the examples at keras.io."""

import keras
import numpy as np
import tensorflow as tf

from model_cases.training import EXAMPLES, Net

layers, ops = keras.layers, keras.ops
SIZE, CLASSES = 32, 4


def _images(size=SIZE, channels=3):
    """Noise with a bright quarter, which is the class."""
    random = np.random.default_rng(1)
    images = random.random((EXAMPLES, size, size, channels), "float32") / 2
    labels, half = random.integers(CLASSES, size=EXAMPLES), size // 2
    for image, label in zip(images, labels, strict=True):
        row, column = label // 2 * half, label % 2 * half
        image[row : row + half, column : column + half] += 0.5
    return images, labels.astype("int32")


def _compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": keras.optimizers.Adam(1e-3), "loss": loss, "jit_compile": False} | options)
    return model


def _application():
    """MobileNetV2 of a third of its width, as keras.applications has it.

    On smaller images, batch normalization of four examples divides by the noise of one value each.
    """
    size = 2 * SIZE
    model = keras.applications.MobileNetV2(
        (size, size, 3), alpha=0.35, weights=None, classes=CLASSES, classifier_activation=None
    )
    return _compiled(model, metrics=["accuracy"]), _images(size)


def _image_classifier(task, **options):
    def make():
        import keras_hub

        task_class = getattr(keras_hub.models, task)
        backbone = task_class.backbone_cls(**options)
        pooling = {"pooling": "token"} if task == "ViTImageClassifier" else {}
        model = task_class(backbone=backbone, num_classes=CLASSES, preprocessor=None, **pooling)
        return _compiled(model, metrics=["accuracy"]), _images()

    return make


def _segmenter():
    """SegFormer on a pyramid of two stages; the class of each pixel is whether it is bright."""
    import keras_hub

    encoder = keras_hub.models.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=(SIZE, SIZE, 3),
        hidden_dims=[16, 32],
    )
    backbone = keras_hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=16)
    model = keras_hub.models.SegFormerImageSegmenter(backbone=backbone, num_classes=2, preprocessor=None)
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0  # XLA would draw another mask, so that trainings could not be compared
    images, _ = _images()
    return _compiled(model, metrics=["sparse_categorical_accuracy"]), (images, (images.mean(-1) > 0.5).astype("int32"))


def _bidirectional_lstm():
    """As keras.io/examples/nlp/bidirectional_lstm_imdb, with 500 words and 16 units."""
    inputs = keras.Input(shape=(None,), dtype="int32")
    x = layers.Embedding(500, 16)(inputs)
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(16))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    words = np.random.default_rng(1).integers(500, size=(EXAMPLES, 24)).astype("int32")
    return _compiled(model, loss="binary_crossentropy", metrics=["accuracy"]), (
        words,
        (words[:, 0] > 250).astype("int32"),
    )


class Gan(keras.Model):
    """Two networks with an optimizer each, after keras.io/examples/generative/dcgan_overriding_train_step.

    As there, noise comes from tf.random, and it is added to the labels, too.
    """

    def __init__(self, latent_dim=16):
        super().__init__()
        self.latent_dim = latent_dim
        leaky, strided = {"negative_slope": 0.2}, {"kernel_size": 4, "strides": 2, "padding": "same"}
        body = [part for width in (8, 16) for part in (layers.Conv2D(width, **strided), layers.LeakyReLU(**leaky))]
        judge = [layers.Flatten(), layers.Dropout(0.2), layers.Dense(1)]
        self.discriminator = keras.Sequential([keras.Input((SIZE, SIZE, 3)), *body, *judge], name="discriminator")
        up = [part for _ in range(2) for part in (layers.Conv2DTranspose(16, **strided), layers.LeakyReLU(**leaky))]
        start = [keras.Input((latent_dim,)), layers.Dense(8 * 8 * 16), layers.Reshape((8, 8, 16))]
        image = layers.Conv2D(3, 5, padding="same", activation="sigmoid")
        self.generator = keras.Sequential([*start, *up, image], name="generator")

    def compile(self, d_optimizer, g_optimizer, loss_fn, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, real):
        count = tf.shape(real)[0]
        both = tf.concat([self.generator(tf.random.normal((count, self.latent_dim))), real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both, training=True))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = tf.random.normal((count, self.latent_dim))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((count, 1)), self.discriminator(self.generator(noise), training=True))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def _gan():
    model = Gan()
    first, second = (keras.optimizers.Adam(3e-4) for _ in range(2))
    model.compile(first, second, keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    return model, _images()[0]


class Sampling(layers.Layer):
    """Draws from the normal distribution of a mean and the logarithm of a variance."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        return mean + ops.exp(log_variance / 2) * keras.random.normal(ops.shape(mean), seed=self.seed_generator)


class Vae(keras.Model):
    """A variational autoencoder with metrics of its own, after keras.io/examples/generative/vae."""

    def __init__(self, latent_dim=2):
        super().__init__()
        strided = {"kernel_size": 3, "strides": 2, "padding": "same", "activation": "relu"}
        inputs = x = keras.Input((28, 28, 1))
        for width in (8, 16):
            x = layers.Conv2D(width, **strided)(x)
        x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
        mean, log_variance = (layers.Dense(latent_dim, name=name)(x) for name in ("z_mean", "z_log_var"))
        self.encoder = keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])], name="encoder")
        start = [layers.Dense(7 * 7 * 16, activation="relu"), layers.Reshape((7, 7, 16))]
        up = [layers.Conv2DTranspose(width, **strided) for width in (16, 8)]
        image = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")
        self.decoder = keras.Sequential([keras.Input((latent_dim,)), *start, *up, image], name="decoder")
        self.trackers = {name: keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, drawn = self.encoder(data)
            wrong = keras.losses.binary_crossentropy(data, self.decoder(drawn))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            losses = [ops.mean(ops.sum(wrong, axis=(1, 2))), ops.mean(ops.sum(divergence, axis=1))]
            losses = [sum(losses), *losses]
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, loss in zip(self.metrics, losses, strict=True):
            tracker.update_state(loss)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def _vae():
    model = Vae()
    model.compile(keras.optimizers.Adam(1e-3), jit_compile=False)
    return model, _images(28, channels=1)[0]


NETS = (
    Net("MobileNetV2", _application),
    Net(
        "ResNet",
        _image_classifier(
            "ResNetImageClassifier",
            input_conv_filters=[64],
            input_conv_kernel_sizes=[3],
            stackwise_num_filters=[64, 64],
            stackwise_num_blocks=[2, 2],
            stackwise_num_strides=[1, 2],
            block_type="basic_block",
            image_shape=(SIZE, SIZE, 3),
        ),
        needs="keras_hub",
    ),
    Net(
        "DenseNet",
        _image_classifier(
            "DenseNetImageClassifier", stackwise_num_repeats=[2, 2, 2], image_shape=(SIZE, SIZE, 3), growth_rate=8
        ),
        needs="keras_hub",
    ),
    Net(
        "ViT",
        _image_classifier(
            "ViTImageClassifier",
            image_shape=(SIZE, SIZE, 3),
            patch_size=4,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            mlp_dim=48,
        ),
        needs="keras_hub",
    ),
    Net(
        "Swin Transformer",
        _image_classifier(
            "SwinTransformerImageClassifier",
            image_shape=(SIZE, SIZE, 3),
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            patch_size=2,
            drop_path=0.0,
        ),
        needs="keras_hub",
    ),
    Net("SegFormer", _segmenter, needs="keras_hub"),
    Net("bidirectional LSTM", _bidirectional_lstm),
    Net("DCGAN", _gan),
    Net("VAE", _vae),
)
