"""Keras' trainer: its step, its epochs and what it makes of the data."""

from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TFEpochIterator, reduce_per_replica
from keras.src.losses.loss import unscale_loss_for_distribution
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.utils.io_utils import print_msg
from keras.src.utils.python_utils import pythonify_logs

__all__ = [
    "ArrayDataAdapter",
    "BaseOptimizer",  # whose methods every optimizer has; the public class has those of the backend over them
    "GeneratorDataAdapter",
    "PyDatasetAdapter",
    "TFEpochIterator",  # what fit iterates
    "TensorFlowTrainer",  # whose methods keras.Model has
    "get_data_adapter",  # makes one of the adapters for what fit is given
    "has_keras_own",
    "print_msg",  # prints as Keras does: not in interactive logs that are off
    "pythonify_logs",  # logs as floats, sorted
    "reduce_per_replica",  # of values of the replicas: the first, the sum, the mean or all
    "train_validation_split",  # what validation_split does to arrays
    "unscale_loss_for_distribution",
]


TensorFlowTrainer = next(base for base in keras.Model.__mro__ if base.__module__ == TFEpochIterator.__module__)


def has_keras_own(model: Any, name: str) -> bool:
    """Whether a model has Keras' own method of this name, which its class does not override."""
    return getattr(type(model), name) is getattr(TensorFlowTrainer, name)
