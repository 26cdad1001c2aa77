"""How many examples each epoch of a fit has had."""

import math

import keras


def count_examples(model: keras.Model) -> float:
    """The examples since Keras' loss tracker was reset, those of all replicas; 0 where it counts none.

    Reading them waits for the steps that are launched.
    """
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        return 0.0
    count = tracker.count.value  # the weight of the mean: Keras weights each batch's loss with its examples
    parts = getattr(count, "values", None)
    if parts is None:
        return float(count.numpy())
    # One part a replica. Read as one, it would wait until each worker reads it, and not all may have this callback.
    return sum(float(part.numpy()) for part in parts) * model.distribute_strategy.num_replicas_in_sync / len(parts)


class EpochExamples:
    """Counts an epoch's examples, without a wait in the middle of it.

    Keras' loss tracker is read after the training's first step, which has just kept the host waiting, and after each
    epoch's last one, before a validation resets it. Where another callback has reset it in the middle of the epoch, by
    `evaluate`, each batch counts as large as the first.

    Attributes:
        due: The step of the epoch, from 0, after which `look` is to be called.
        batch_size: Examples of a step; None before the first, 0 where Keras counts none.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.batch_size: float | None = None
        self._last_step = math.inf
        self.start(None)

    def start(self, steps: int | None) -> None:
        """Begins an epoch of so many steps; None: not known."""
        self._last_step = math.inf if steps is None else steps - 1
        self._counted: float | None = None
        self.due: float = 0 if self.batch_size is None else self._last_step

    def look(self, step: int) -> None:
        """Reads the count after a step of the epoch."""
        self._counted = count_examples(self._model)
        if self.batch_size is None:
            self.batch_size = self._counted / (step + 1)
        self.due = self._last_step
        if step < self._last_step:
            self._counted = None

    def examples(self, steps_done: int) -> float | None:
        """The examples of the epoch, which had so many steps; None where Keras counts none."""
        if not self.batch_size or not steps_done:
            return None
        counted = count_examples(self._model) if self._counted is None else self._counted
        # Steps of one size, the last perhaps smaller: any other count is not this epoch's.
        whole = steps_done * self.batch_size
        return counted if whole - self.batch_size < counted <= whole else whole
