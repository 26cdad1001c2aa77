"""How far the training of a model is."""

import keras


def steps_trained(model: keras.Model) -> int:
    """Returns how many steps a model's optimizer has taken; 0 where it cannot tell. It reads a variable.

    After `keras.callbacks.BackupAndRestore` these are the steps of the runs before as well.
    """
    optimizer = getattr(model, "optimizer", None)
    # Not `.iterations`, which counts updates: with gradient accumulation several steps make one.
    counter = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_iterations", None)
    return int(counter.numpy()) if isinstance(counter, keras.Variable) else 0
