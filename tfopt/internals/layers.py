"""What Keras' models consist of beyond its public layers."""

import inspect

import keras

from tfopt.internals.sources import Missing, private

Cast = private("keras.src.ops.core:Cast")
"""The operation that Keras puts before an input of another dtype."""

Functional = private("keras.src.models.functional:Functional")
"""A graph of layers; every Functional model is one."""

IndexLookup = private("keras.src.layers.preprocessing.index_lookup:IndexLookup")
"""StringLookup and IntegerLookup."""

KerasSaveable = private("keras.src.saving.keras_saveable:KerasSaveable")
"""Layers, models, optimizers, metrics, losses."""

LossFunctionWrapper = private("keras.src.losses.losses:LossFunctionWrapper")
"""Losses that are a function of y_true and y_pred."""

SafeModeScope = private("keras.src.saving.serialization_lib:SafeModeScope")

TrackableDataStructure = private("tensorflow.python.trackable.data_structures:TrackableDataStructure")
"""What TensorFlow makes of a list or dict that is set as an attribute."""

Tracker = private("keras.src.utils.tracking:Tracker")
"""Finds the variables and layers that are set as attributes."""

no_automatic_dependency_tracking = private("keras.src.utils.tracking:no_automatic_dependency_tracking")

to_snake_case = private("keras.src.utils.naming:to_snake_case")
"""As layers are named after their class."""

CUTS_GRAPHS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14)
"""Whether a `keras.Function` may begin at tensors in the middle of a graph."""


def is_made_of_graph(kind: type) -> bool:
    """Whether a class is called as `keras.Model(inputs, outputs)`. Keras' own answer is wrong before 3.14."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())  # type: ignore[misc]
    named = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    rest = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return named[1:] == ["inputs", "outputs", "name"] or rest <= {one.kind for one in parameters}


def operations(*names: str) -> tuple[type, ...]:
    """Operations of `keras.ops` as classes, by names such as "nn.Gelu"; without those that this release lacks."""
    found = [private(f"keras.src.ops.{name.replace('.', ':')}") for name in names]
    return tuple(one for one in found if not isinstance(one, Missing))
