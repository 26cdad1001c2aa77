"""SIGTERM, which TensorFlow's distributed runtime takes away from Python."""

import signal
import threading


def restore_sigterm() -> None:
    """Gives SIGTERM back to Python. Call it in the main thread when TensorFlow's distributed runtime has started.

    That runtime puts a handler of its own in place, which takes note of the signal and lets the process run on. What
    `signal.signal` has set before, or the default action, is in force again after this. `tfopt.distribute.strategy()`
    calls it; call it yourself only after a strategy that you make yourself. In another thread, as in Ray's workers, it
    does nothing: Python changes signals in the main one alone.

    Example:
        >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
        >>> restore_sigterm()
    """
    handler = signal.getsignal(signal.SIGTERM)
    # A handler that was not set from Python cannot be set again.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
