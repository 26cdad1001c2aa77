"""D21, `rounded_ids`: under a 16-bit policy, a Sequential without an Input rounds its inputs, ids included."""

from typing import Any

import keras

from tfopt.repairs.repair import Function, Repair

_SEQUENTIAL = "keras.src.models.sequential:Sequential"


def set_input_dtype(layer: keras.layers.InputLayer, dtype: str) -> None:
    """Lets an InputLayer hand on another dtype, also in the models that hold it already."""
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
        "ids, of which bfloat16 holds those up to 256 and float16 those up to 2048, before an Embedding looks them up, "
        "and most rows of a large vocabulary are mistaken for others."
    ),
    reference="Keras, Sequential.build; no upstream report was found.",
    broken={
        f"{_SEQUENTIAL}.build": frozenset({"958bc878a2b2301e"}),
        f"{_SEQUENTIAL}._maybe_build": frozenset({"78da3709ad2dabc0"}),
    },
    # An instance binds its build when it is made, so the call that builds one made earlier is mended too.
    replace={f"{_SEQUENTIAL}.build": _with_float32_input, f"{_SEQUENTIAL}._maybe_build": _with_float32_input},
    without="Begin the model with keras.Input(shape, dtype='int32').",
)
