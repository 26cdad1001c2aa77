"""Saves checkpoints in a background thread, one at a time."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from tfopt.checkpoint.folder.store import Store
from tfopt.errors import CheckpointError
from tfopt.warn import warn_once


class Saver:
    """Writes checkpoints to a folder in a thread.

    Args:
        store: The folder.
        on_error: "warn" to log a checkpoint that cannot be saved and continue, "raise" to raise the error in the next
            call.
    """

    def __init__(self, store: Store, on_error: Literal["warn", "raise"]):
        self.store = store
        self._on_error = on_error
        # Python waits for this thread at exit.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfopt-checkpoint")
        self._pending: Future[int] | None = None
        self._step = 0  # of the last one

    def is_free(self) -> bool:
        """Returns whether the last checkpoint is done; reports its error, if any."""
        if self._pending is not None and self._pending.done():
            self.wait()
        return self._pending is None

    def put(self, step: int, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
        """Begins to save a checkpoint. Call `wait` first."""
        self._step = step
        self._pending = self._thread.submit(self.store.write, step, arrays, metadata)

    def wait(self, *, ended: bool = False) -> bool:
        """Waits until the last checkpoint is safe; returns False if it could not be saved.

        Args:
            ended: Whether training has ended. The warning then comes even after an earlier one, since no save follows.

        Raises:
            tfopt.errors.CheckpointError: If it could not be saved, with on_error="raise".
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        try:
            pending.result()
            return True
        except Exception as error:
            if self._on_error == "raise":
                raise
            foreseen = isinstance(error, CheckpointError)
            text = str(error) if foreseen else f"Expected to save a checkpoint. Found: {error!r}."
            which = f" {self._step}, the last" if ended else ""
            then = (
                "The training has ended, and this was its last checkpoint. Save the model before this process ends."
                if ended
                else "Training continues; the next checkpoint is tried when it is due."
            )
            warn_once(
                f"checkpoint {self.store.folder}{which}",
                f"{text} {then}",
                error=None if foreseen else error,
            )
            return False

    def close(self) -> None:
        """Waits for the last checkpoint and lets another training save to the folder. A second call does nothing."""
        self._thread.shutdown()
        self.store.close()
