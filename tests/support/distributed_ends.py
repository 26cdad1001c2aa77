"""A worker of a training whose workers do not do the same: python distributed_ends.py CASE"""

import sys
import time

import tfopt

strategy = tfopt.distribute.strategy("auto")

import keras  # noqa: E402
import numpy as np  # noqa: E402

case, rank = sys.argv[1], tfopt.distribute.resolve().index
x, y = np.ones((32, 3), "float32"), np.ones((32, 2), "float32")
with strategy.scope():
    units = 5 if case == "another-model" and rank == 1 else 2
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)


def fit(epochs=2, **hooks):
    callbacks = [keras.callbacks.LambdaCallback(**hooks)]
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def wait_in_python(epoch, logs):
    if epoch == (case == "one-waits-at-the-end"):
        time.sleep(3600)


if case == "one-epoch-fewer":
    fit(epochs=3 - rank)
elif case.startswith("one-waits"):
    fit(on_epoch_end=wait_in_python if rank == 1 else None)
else:
    fit()
    if case.startswith("chief-evaluates") and rank == 0:
        model.evaluate(x, y, batch_size=8, verbose=0)
    if case == "chief-evaluates-between":
        fit()
    elif case == "each-waits-elsewhere":
        {0: lambda: model.evaluate(x, y, batch_size=8, verbose=0), 1: lambda: time.sleep(3600)}[rank]()
print("ended", flush=True)
