"""D21, `rounded_ids`: under a 16-bit policy, a Sequential without an Input rounds its inputs, ids included."""

from typing import Any

import keras

from tfopt.repairs.repair import Function, Repair

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
        f"{_SEQUENTIAL}.build": frozenset({"958bc878a2b2301e"}),
        f"{_SEQUENTIAL}._maybe_build": frozenset({"78da3709ad2dabc0"}),
    },
    # An instance binds its build when it is made, so _maybe_build is replaced for those made earlier.
    replace={f"{_SEQUENTIAL}.build": _with_float32_input, f"{_SEQUENTIAL}._maybe_build": _with_float32_input},
    without="Begin the model with keras.Input(shape, dtype='int32').",
)
