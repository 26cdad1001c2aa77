"""Trains a tiny model as one worker until something ends it: python distributed_endless.py [options]"""

import argparse
import signal

import tfopt

parser = argparse.ArgumentParser()
parser.add_argument("--start-seconds", type=float, default=60.0)
parser.add_argument("--steps", type=int, help="end well after so many")
parser.add_argument("--fail-in", type=int, metavar="RANK", help="this worker raises an error at step 5")
parser.add_argument("--handle-sigterm", action="store_true", help="end the training well on SIGTERM")
options = parser.parse_args()
signals = []


def note(number, frame):
    """Installed before the strategy, as a user's own handler would be."""
    signals.append(number)
    print("terminating", flush=True)


if options.handle_sigterm:
    signal.signal(signal.SIGTERM, note)
print("waiting", flush=True)
strategy = tfopt.distribute.strategy("auto", start_seconds=options.start_seconds)

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402


class Follow(keras.callbacks.Callback):
    """Prints its progress and ends as the options say."""

    def on_train_batch_end(self, step, logs=None):
        if step % 10 == 0:
            print(f"step {step}", flush=True)
            self.model.stop_training = self.any_worker_is_to_end()
        if step == 5 and options.fail_in == tfopt.distribute.resolve().index:
            raise ValueError("no such label")

    def any_worker_is_to_end(self):
        """All workers ask at the same step: one that ended a step earlier would leave the others waiting."""
        own = strategy.experimental_distribute_values_from_function(lambda context: tf.constant(float(len(signals))))
        return bool(strategy.reduce("sum", own, axis=None) > 0)


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
examples = tf.data.Dataset.from_tensor_slices((tf.ones((8, 3)), tf.ones((8, 2))))
endless = examples.repeat().batch(8, drop_remainder=True)
steps = options.steps or 10**9
model.fit(endless, steps_per_epoch=steps, verbose=0, callbacks=[Follow()])
print("trained", flush=True)
