"""What Keras' models consist of beyond its public layers."""

import inspect

import keras
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional
from keras.src.ops import nn, numpy
from keras.src.ops.core import Cast
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.utils.naming import to_snake_case
from keras.src.utils.tracking import Tracker, no_automatic_dependency_tracking
from tensorflow.python.trackable.data_structures import TrackableDataStructure

__all__ = [
    "CUTS_GRAPHS",
    "Cast",  # the operation that Keras puts before an input of another dtype
    "Functional",  # a graph of layers; every Functional model is one
    "IndexLookup",  # StringLookup and IntegerLookup
    "KerasSaveable",  # layers, models, optimizers, metrics, losses
    "LossFunctionWrapper",  # losses that are a function of y_true and y_pred
    "SafeModeScope",
    "TrackableDataStructure",  # what TensorFlow makes of a list or dict that is set as an attribute
    "Tracker",  # finds the variables and layers that are set as attributes
    "is_made_of_graph",
    "nn",  # operations of keras.ops, as classes
    "no_automatic_dependency_tracking",
    "numpy",  # operations of keras.ops, as classes
    "to_snake_case",  # as layers are named after their class
]

CUTS_GRAPHS = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14)
"""Whether a `keras.Function` may begin at tensors in the middle of a graph."""


def is_made_of_graph(kind: type) -> bool:
    """Whether a class is called as `keras.Model(inputs, outputs)`. Keras' own answer is wrong before 3.14."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())  # type: ignore[misc]
    named = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    rest = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return named[1:] == ["inputs", "outputs", "name"] or rest <= {one.kind for one in parameters}
