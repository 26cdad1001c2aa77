"""The lines of code that take a cause away, as they fit the data and the callbacks of a training."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfopt.causes import catalogue
from tfopt.diagnosis.training import Training
from tfopt.pipelines.plan import PipelinePlan


def slow_input(training: Training) -> str:
    """Lines that make the input faster."""
    data, size = training.data, training.examples
    if isinstance(data, keras.utils.PyDataset):
        if data.workers > 1:
            return "# Its __getitem__ is the limit: more workers, or use_multiprocessing=True"
        return "super().__init__(workers=4, max_queue_size=16)  # in its __init__"
    if isinstance(data, PipelinePlan):
        return 'cache="memory"  # in build_pipeline, if the decoded examples fit there'
    if isinstance(data, tf.data.Dataset):
        return (
            "# After the slow stage, before shuffle and anything random, if memory allows\n"
            "# build_pipeline does more: docs/pipelines.md\n"
            "dataset = dataset.cache()"
        )
    if isinstance(data, Iterator):
        return "# Instead of a generator: a keras.utils.PyDataset with workers=4"
    if not training.validation_split:
        return (
            "from tfopt.pipelines import build_pipeline\n"
            f"dataset = build_pipeline((x, y), batch_size={size})  # your arrays\n"
            "model.fit(dataset, ...)                              # without batch_size"
        )
    return (
        "from tfopt.pipelines import build_pipeline\n"
        f"options = dict(batch_size={size}, split={training.validation_split:g})\n"
        "dataset = build_pipeline((x, y), **options)  # your arrays\n"
        "validation = build_pipeline((x, y), training=False, **options)\n"
        "model.fit(dataset, validation_data=validation, ...)  # no validation_split"
    )


def larger_batch(training: Training) -> str:
    """Lines that double the batch, after one that measures which size pays."""
    data, size = training.data, 2 * training.examples
    if isinstance(data, PipelinePlan):
        line = f"batch_size={size}  # in build_pipeline"
    elif isinstance(data, keras.utils.PyDataset):
        line = f"# Let its __getitem__ return {size} examples"
    elif isinstance(data, tf.data.Dataset):
        line = f"batch({size})  # where the dataset is batched"
    elif isinstance(data, Iterator):
        line = f"# Let the generator yield {size} examples"
    else:
        line = f"model.fit(..., batch_size={size})"
    measured = "import tfopt\nprint(tfopt.batch.find(model, dataset))  # which size fits and pays"
    return f"{measured}\n{line}\n# Changes the training: docs/diagnosis.md"


def opened_each_epoch(training: Training) -> str:
    """Lines for data that are opened again in each epoch."""
    if isinstance(training.data, tf.data.Dataset):
        return catalogue.EPOCH_STARTS.code
    return "# Fewer and longer epochs"


def shapes(training: Training) -> str:
    """Lines that give batches one shape."""
    data = training.data
    if isinstance(data, tf.data.Dataset):
        return catalogue.NEW_SHAPES.code
    if isinstance(data, PipelinePlan):
        return 'remainder="drop"  # in build_pipeline, if the last batch is smaller'
    if isinstance(data, keras.utils.PyDataset | Iterator):
        return "# Give all batches one shape: leave the last, smaller one out, or pad"
    return (
        "from tfopt.pipelines import build_pipeline\n"
        f'dataset = build_pipeline((x, y), batch_size={training.examples}, remainder="drop")'
    )


def in_each_batch(callback: keras.callbacks.Callback) -> str:
    """Lines that let a callback work less often."""
    if type(callback).__module__.startswith("keras."):
        return "# Use its own option, such as save_freq or update_freq, or leave it out"
    return catalogue.CALLBACK.code


def validation(training: Training, batches: int) -> tuple[str, float]:
    """Lines for a validation that takes a fifth of the time, and the share of it that they save."""
    often = 5 * training.epochs_per_validation
    if often <= training.epochs:
        return f"model.fit(..., validation_freq={often})  # or fewer validation_steps", 0.8
    few = -(-batches // 5)
    return f"model.fit(..., validation_steps={few})  # validates on a part of the data", 1 - few / batches
