"""Keras layers as functions of `augment` that take whole batches and draw from the pipeline's seeds."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.pipelines.shared.elements import without_autograph

_MIXING = ("MixUp", "CutMix")  # Keras' own layers that change labels; a test looks for more


@dataclass(frozen=True, slots=True, eq=False)
class LayerFunction:
    """A Keras layer as a function of a batch with a keyword `seed`.

    A layer's random numbers come from variables that each call advances. Here the seed determines that state for each
    call, and the variables stay as they are: the same seed gives the same draws, and graphs keep no state.

    Args:
        layer: The layer. It gets the first part of a batch; one that changes labels, such as MixUp, gets both parts.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> flip = LayerFunction(keras.layers.RandomFlip())
        >>> images, labels = flip(np.zeros((2, 4, 4, 3), "uint8"), np.arange(2), seed=tf.constant([1, 2]))
        >>> images.shape, images.dtype
        (TensorShape([2, 4, 4, 3]), tf.float32)
    """

    layer: Any

    @without_autograph
    def __call__(self, *parts: Any, seed: Any) -> Any:
        """Returns what the layer makes of the batch in training.

        Args:
            *parts: A tensor of shape (batch, ...), and the labels that belong to it.
            seed: int32, shape (2,).

        Raises:
            ValueError: If the layer cannot take this batch, or keeps state of its own.
        """
        first, *rest = parts
        if not tf.is_tensor(first) and not hasattr(first, "__array__"):
            raise ValueError(
                f"Expected one tensor for the layer {self._name}: the batch, or its first part. Found "
                f"{type(first).__name__}. Return (images, ...) from `transform`, or write a function of a batch and "
                "mark it with per_batch."
            )
        if _changes_labels(self.layer):
            return self._mixed(first, rest, seed)
        self._expect_no_mixing_inside()
        changed = self._called(first, seed)
        return (changed, *rest) if rest else changed

    @property
    def _name(self) -> str:
        return type(self.layer).__name__

    def _mixed(self, images: Any, rest: list[Any], seed: Any) -> Any:
        labels: Any = rest[0] if len(rest) == 1 else None
        if not tf.is_tensor(labels) or labels.shape.rank != 2:
            raise ValueError(
                f"Expected batches (images, labels) for the layer {self._name}, which mixes labels: one-hot ones, of "
                f"shape (batch, classes). Found {1 + len(rest)} parts, the others {rest}. Return "
                "(image, tf.one_hot(label, classes)) from `transform`."
            )
        mixed = self._called({"images": images, "labels": labels}, seed)
        return mixed["images"], mixed["labels"]

    def _called(self, inputs: Any, seed: Any) -> Any:
        import keras

        self._build(inputs)
        counted = {id(variable) for variable in self.layer.weights}
        states = [variable for variable in self.layer.variables if id(variable) not in counted]
        seeds = tf.unstack(tf.random.split(seed, num=max(1, len(states))))
        given = [(state, tf.cast(own, state.dtype)) for state, own in zip(states, seeds, strict=False)]
        with keras.StatelessScope(state_mapping=given) as scope:
            result = self.layer(inputs, training=True)
        if len(scope.state_mapping) > len(states):
            raise ValueError(
                f"Expected a layer that draws from seed generators of its own, and changes nothing else. The layer "
                f"{self._name} changed another variable, such as Keras' global seed: each batch would get the same "
                "draws. Give it keras.random.SeedGenerator as an attribute, and pass that as `seed`."
            )
        return result

    def _build(self, inputs: Any) -> None:
        """Creates the layer's variables, which is impossible while its state is given."""
        import keras

        if not self.layer.built:
            with tf.init_scope():
                self.layer(tf.nest.map_structure(lambda part: keras.KerasTensor(part.shape, part.dtype), inputs))

    def _expect_no_mixing_inside(self) -> None:
        inner = [layer for layer in self.layer._flatten_layers(include_self=False) if _changes_labels(layer)]
        if inner:
            raise ValueError(
                f"Expected layers that mix labels by themselves. Found {type(inner[0]).__name__} inside {self._name}: "
                "the labels would not be mixed. Pass the layers as a list: augment=[...]."
            )


def _changes_labels(layer: Any) -> bool:
    function = getattr(type(layer), "transform_labels", None)
    owner = getattr(function, "__qualname__", "").split(".")[0]
    foreign = not str(getattr(function, "__module__", "")).startswith("keras.")
    return function is not None and (foreign or owner in _MIXING)
