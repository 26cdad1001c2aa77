"""Deletes an iterator over a service in a garbage collection that runs in one of tfopt's threads, if there is one.

Arguments: the service, and the number of a worker to stop, or 0. Prints the thread; ends with 1 if it hangs.
"""

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import tensorflow as tf

from tfopt.pipelines import build_pipeline
from tfopt.pipelines.service import process, relay

SECONDS = 3.0
relay.DEADLINE_SECONDS = SECONDS
held, threads, ended = [], [], []


def on_collection(phase, info):
    """Makes the iterator garbage as a collection begins in a thread of tfopt."""
    name = threading.current_thread().name
    if phase == "start" and held and name.startswith("tfopt-service"):
        threads.append(name)
        cycle = [held.pop()]
        cycle.append(cycle)
    elif phase == "stop" and threads:
        ended.append(name)


def close_after_collecting(peers):
    """Closes connections after a collection, in which the iterator becomes garbage once it has failed."""
    while peers and not (held or threads):
        time.sleep(0.01)
    gc.collect()
    close_connections(peers)


service, worker = sys.argv[1], int(sys.argv[2])
batches = iter(build_pipeline(np.arange(50_000), batch_size=10, shuffle=False, prefetch=0, service=service))
next(batches)
if worker:
    close_connections, process.close_connections = process.close_connections, close_after_collecting
    os.kill(worker, signal.SIGSTOP)
    try:
        while True:
            next(batches)
    except tf.errors.DataLossError:
        pass
gc.callbacks.append(on_collection)
if not worker:
    gc.set_threshold(1)
held.append(batches)
del batches
limit = time.monotonic() + 5 * SECONDS
while not ended and time.monotonic() < limit - 3 * SECONDS * (not threads):
    time.sleep(0.05)
print(threads, ended, flush=True)
os._exit(len(threads) - len(ended) > 0)
