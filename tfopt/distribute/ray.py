"""Keras under Ray Train: synchronous workers that report each epoch and resume after one was lost.

Stock Keras fails under Ray's TensorflowTrainer (ray#47464). `tfopt.distribute.strategy()` in the training function
repairs that, and finds the cluster in the TF_CONFIG that Ray sets.
"""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfopt.errors import UnsupportedError

if TYPE_CHECKING:
    import keras
    from ray.train import Checkpoint
    from ray.train.tensorflow import TensorflowTrainer

_WEIGHTS = "model.weights.h5"
_EPOCHS = "epochs"


def trainer(train: Callable[..., Any], **options: Any) -> "TensorflowTrainer":
    """Returns Ray's TensorflowTrainer for a training function that calls `tfopt.distribute.strategy()`.

    Call `fit()` on it in the script you submit to Ray. Each worker then uses only its own GPUs, sees Keras 3 as
    `tf.keras`, and is no longer watched once the function returns.

    Args:
        train: The training function, with or without a config argument. It imports TensorFlow and Keras itself.
        options: For TensorflowTrainer: `scaling_config`, `run_config`, `train_loop_config` and more.

    Raises:
        tfopt.errors.UnsupportedError: If Ray is not installed, or the number of workers is a range (elastic training).

    Example:
        >>> run = trainer(train, scaling_config=ScalingConfig(num_workers=2))
        >>> print(run.fit().metrics)
    """
    try:
        from ray.train.tensorflow import TensorflowTrainer
    except ImportError as error:
        raise UnsupportedError(
            "Expected Ray to be installed. Found: it is not. Run: pip install 'tfopt[ray]'"
        ) from error
    workers = getattr(options.get("scaling_config"), "num_workers", 1)
    if not isinstance(workers, int):
        raise UnsupportedError(
            f"Expected a fixed number of workers. Found: ScalingConfig(num_workers={workers!r}), a range within which "
            "Ray changes the number while the training runs; tf.distribute fixes it at the start. What to do: give one "
            "number, and start again from the checkpoint to change it."
        )
    return TensorflowTrainer(_in_worker(train), **options)


def report_checkpoints(model: "keras.Model") -> "keras.callbacks.Callback":
    """Returns a callback that reports each epoch's metrics, weights and optimizer state to Ray Train.

    Pass it to `fit` in every worker, and call `restore` before `fit`.

    Example:
        >>> model.fit(x, y, epochs=10, initial_epoch=restore(model), callbacks=[report_checkpoints(model)])
    """
    import keras

    return keras.callbacks.LambdaCallback(on_epoch_end=functools.partial(_report, model))


def restore(model: "keras.Model") -> int:
    """Loads this run's checkpoint from Ray Train and returns how many epochs it holds; 0 if there is none.

    Call it in every worker, after `compile` and before `fit` (see `report_checkpoints`). Ray has a checkpoint after a
    worker was lost, and from an earlier run of the same name.
    """
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    load(model, checkpoint)
    return int(checkpoint.get_metadata()[_EPOCHS])


def load(model: "keras.Model", checkpoint: "Checkpoint") -> None:
    """Loads what `report_checkpoints` saved; after the training, that is `result.checkpoint`."""
    with model.distribute_strategy.scope(), checkpoint.as_directory() as folder:
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)  # otherwise its state in the file would be skipped
        model.load_weights(Path(folder, _WEIGHTS))


def _report(model: "keras.Model", epoch: int, logs: dict[str, float] | None) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(Path(folder, _WEIGHTS))  # in all workers: one that saves alone may wait for the others
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            checkpoint.set_metadata({_EPOCHS: epoch + 1})
        ray.train.report(dict(logs or {}), checkpoint=checkpoint)


def _in_worker(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)  # Ray inspects the signature for the config
    def run(*config: Any) -> Any:
        from tfopt.distribute.placement import ASSIGNED
        from tfopt.distribute.watchdog.watch import Watch

        os.environ.pop("TF_USE_LEGACY_KERAS", None)  # Ray sets it, for Keras 2
        os.environ[ASSIGNED] = "1"
        result = train(*config)
        Watch.say_bye()  # Ray kills its workers, so nothing runs at their exit
        return result

    return run
