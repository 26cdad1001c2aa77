"""Fails in worker 1 alone, in each of several ways, and writes what both workers raise into FOLDER, as JSON."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

from tfopt import distribute


def main():
    """Fails."""
    folder = Path(sys.argv[1])
    strategy = distribute.strategy("auto")
    index = distribute.resolve().index
    from tfopt.callbacks import TrainingCheckpoint
    from tfopt.distribute.cluster.together import all_or_none
    from tfopt.errors import PipelineError

    class Stateful(keras.callbacks.Callback):
        def get_state(self):
            return {1, 2} if index else {}

        def set_state(self, state):
            pass

    def inside(kind):
        with all_or_none(strategy):
            if index == 1:
                raise kind("planted")

    def fitted(vocabulary, *callbacks):
        with strategy.scope():
            layers = [keras.layers.IntegerLookup(vocabulary=vocabulary), keras.layers.Embedding(3, 1)]
            model = keras.Sequential([keras.Input((1,), dtype="int64"), *layers, keras.layers.Flatten()])
            model.compile("sgd", "mse", jit_compile=False)
        callbacks = [TrainingCheckpoint(folder / "saved", signals=()), *callbacks]
        model.fit(np.array([[1], [2]]), np.ones((2, 1)), batch_size=2, shuffle=False, verbose=0, callbacks=callbacks)

    def raised(function, *arguments):
        try:
            function(*arguments)
        except Exception as error:
            return [type(error).__name__, str(error)]
        return None

    found = {
        "tfopt's": raised(inside, PipelineError),
        "another's": raised(inside, ValueError),
        "state": raised(fitted, [1, 2], Stateful()),
        "none": raised(fitted, [1, 2]),
        "vocabulary": raised(fitted, [2, 1] if index else [1, 2]),
        "after all": raised(fitted, [1, 2]),
    }
    (folder / f"{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
