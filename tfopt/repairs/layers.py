"""Defects of what Keras' layers compute.

- D21, `rounded_ids`: under a 16-bit policy, a Sequential without an Input rounds its inputs, ids included.
- `random_layers`: Dropout and other random layers draw the same numbers in every replica.
"""

from typing import Any

import keras
import tensorflow as tf

from tfopt.repairs.probes import on_one_device, on_replicas
from tfopt.repairs.repair import Function, Repair, in_several_replicas

_SEQUENTIAL = "keras.src.models.sequential:Sequential"


def set_input_dtype(layer: keras.layers.InputLayer, dtype: str) -> None:
    """Changes the dtype that an InputLayer passes on, also in models that already contain it."""
    layer._dtype = layer._input_tensor._dtype = dtype


def _with_float32_input(original: Function) -> Function:
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        given = self._layers[:1]
        original(self, *args, **kwargs)
        added = self._layers[:1]
        if added and added[0] not in given and added[0].dtype in ("float16", "bfloat16"):
            set_input_dtype(added[0], "float32")

    return build


ROUNDED_IDS = Repair(
    name="rounded_ids",
    defect=(
        "Sequential.build adds an InputLayer with the first layer's compute dtype: under a 16-bit policy it rounds "
        "ids before an Embedding looks them up (bfloat16 holds integers up to 256, float16 up to 2048), so most ids of "
        "a large vocabulary get another id's row."
    ),
    reference="Keras, Sequential.build; no upstream report was found.",
    broken={
        f"{_SEQUENTIAL}.build": frozenset({"958bc878a2b2301e", "f65088e106c4dfda"}),
        f"{_SEQUENTIAL}._maybe_build": frozenset({"78da3709ad2dabc0"}),
    },
    # An instance binds its build when it is made, so _maybe_build is replaced for those made earlier.
    replace={f"{_SEQUENTIAL}.build": _with_float32_input, f"{_SEQUENTIAL}._maybe_build": _with_float32_input},
    probe=on_one_device("ROUNDED_IDS", "wrong_ids", 0.0),
    without="Begin the model with keras.Input(shape, dtype='int32').",
)


# The golden ratio of 2**31: whatever the seeds and the number of replicas, no two are likely to meet.
_APART = 1_327_217_885


def _drawing_apart(original: Function) -> Function:
    def next(self: Any, ordered: bool = True) -> Any:
        seed = original(self, ordered)  # the generator's state stays the same in all replicas
        if not in_several_replicas():
            return seed
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, seed.dtype)
        return seed + tf.stack([replica * _APART, tf.zeros_like(replica)])  # the first replica draws as one device

    return next


RANDOM_LAYERS = Repair(
    name="random_layers",
    defect=(
        "Under a tf.distribute strategy with several replicas, Dropout, GaussianNoise, RandomFlip and all other layers "
        "that draw random numbers draw the same ones in every replica: the masks of a batch repeat."
    ),
    reference="Keras, SeedGenerator.next; no upstream report was found.",
    broken={"keras.src.random.seed_generator:SeedGenerator.next": frozenset({"accb51a483056353"})},
    replace={"keras.src.random.seed_generator:SeedGenerator.next": _drawing_apart},
    probe=on_replicas("RANDOM_LAYERS", "same_draws", 0.0),
    without="Train on a single replica, or without random layers.",
)
