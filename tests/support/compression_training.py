"""Trains with compressed gradients, and writes the outcomes.

python compression_training.py FOLDER here|workers few|rest
"""

import pickle
import sys
import warnings
from pathlib import Path

import tensorflow as tf

from tfopt import distribute


def outcome(case, strategy):
    """Trains a case: the weights, what it says of its traffic, and the tensors exchanged in one traced step."""
    import keras

    keras.config.set_floatx("float64" if case.dtype == "float64" else "float32")
    with strategy.scope():
        model = case.model()
    distribute.compress_gradients(model, case.method)
    with Noting() as exchanged:
        model.fit(case.dataset(), epochs=case.epochs, verbose=0)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    scale = getattr(model.optimizer, "dynamic_scale", None)
    parts = [[part.numpy() for part in strategy.experimental_local_results(each.value)] for each in model.weights]
    return {
        "weights": model.get_weights(),
        "apart": max(float(abs(part - same[0]).max()) for same in parts for part in same),
        "exchanged": exchanged,
        "compression": optimizer.compression.to_dict(),
        "scale": None if scale is None else float(scale.value.numpy()),
    }


class Noting:
    """Notes the number of elements of the tensors that replicas sum, as traced."""

    def __enter__(self):
        self._stock, found = tf.distribute.ReplicaContext.all_reduce, []

        def noted(context, op, value, *args, **kwargs):
            for leaf in tf.nest.flatten(value):
                if isinstance(leaf, tf.Tensor) and context.replica_id_in_sync_group is not None:
                    found.append(leaf.shape.num_elements())
            return self._stock(context, op, value, *args, **kwargs)

        tf.distribute.ReplicaContext.all_reduce = noted
        return found

    def __exit__(self, *error):
        tf.distribute.ReplicaContext.all_reduce = self._stock


def main():
    """Trains all of it."""
    folder, where, share = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if where == "here":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = distribute.strategy("auto", check_data=False)  # which exchanges what it has counted
    import compression_cases

    found = {}
    for name, case in compression_cases.in_share(share, where).items():
        try:
            found[name] = outcome(case, strategy)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    rank = distribute.resolve().index if where == "workers" else ""
    (folder / f"{where}{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
