"""Keras' trainer: its step, its epochs and what it makes of the data."""

from typing import Any

from tfopt.internals.sources import private

ArrayDataAdapter = private("keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter")

BaseOptimizer = private("keras.src.optimizers.base_optimizer:BaseOptimizer")
"""Whose methods every optimizer has; the public class has those of the backend over them."""

GeneratorDataAdapter = private("keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter")

PyDatasetAdapter = private("keras.src.trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter")

TFEpochIterator = private("keras.src.backend.tensorflow.trainer:TFEpochIterator")
"""What fit iterates."""

TensorFlowTrainer = private("keras.src.backend.tensorflow.trainer:TensorFlowTrainer")
"""Whose methods keras.Model has."""

get_data_adapter = private("keras.src.trainers.data_adapters:get_data_adapter")
"""Makes one of the adapters for what fit is given."""

print_msg = private("keras.src.utils.io_utils:print_msg")
"""Prints as Keras does: not in interactive logs that are off."""

pythonify_logs = private("keras.src.utils.python_utils:pythonify_logs")
"""Logs as floats, sorted."""

reduce_per_replica = private("keras.src.backend.tensorflow.trainer:reduce_per_replica")
"""Of values of the replicas: the first, the sum, the mean or all."""

train_validation_split = private("keras.src.trainers.data_adapters.array_slicing:train_validation_split")
"""What validation_split does to arrays."""

unscale_loss_for_distribution = private("keras.src.losses.loss:unscale_loss_for_distribution")


def has_keras_own(model: Any, name: str) -> bool:
    """Whether a model has Keras' own method of this name, which its class does not override."""
    return getattr(type(model), name) is getattr(TensorFlowTrainer, name)
