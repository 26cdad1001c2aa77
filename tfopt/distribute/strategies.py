"""Chooses the tf.distribute strategy: one script trains on one device, on all of a machine and on many machines."""

import json
import os
import re
import sys
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfopt import hardware, repairs
from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.cluster.resolving import resolve
from tfopt.distribute.data_check.fits import DATA_CHECK
from tfopt.distribute.placement import ASSIGNED, VISIBLE, bind_cpus, threads, visible_devices
from tfopt.distribute.preflight import check_host
from tfopt.distribute.watchdog.barrier import MissingPeerError
from tfopt.distribute.watchdog.progress import count_progress
from tfopt.distribute.watchdog.watch import RESTART, Watch, restore_sigterm
from tfopt.errors import ClusterError, UnsupportedError, unknown_name

KINDS = ("auto", "one_device", "mirrored", "multi_worker")

_SHARDING = "Keras on JAX with keras.distribution.ModelParallel, or PyTorch's FSDP"
_SHARDED_STATE = 'tfopt.distribute.shard_optimizer under strategy("auto"), which shards the optimizer\'s state'
# What other strategies do, and what to use instead.
_UNSUPPORTED = {
    "model_parallel": ("splits a model over devices", _SHARDING),
    "data_parallel": ("is part of keras.distribution, which does nothing on TensorFlow", 'strategy("auto")'),
    "pipeline_parallel": ("runs the layers of a model on several devices in turn", "PyTorch's pipelining"),
    "zero": (
        "shards training state over the replicas",
        f"{_SHARDED_STATE}; for the gradients and weights, {_SHARDING}",
    ),
    "zero_1": ("shards the optimizer's state, which is the optimizer's matter", _SHARDED_STATE),
    "zero_2": ("shards the gradients and the optimizer's state", f"{_SHARDING}, or {_SHARDED_STATE}"),
    "zero_3": ("shards the weights, the gradients and the optimizer's state", f"{_SHARDING}, or {_SHARDED_STATE}"),
    "fsdp": ("shards the weights, the gradients and the optimizer's state", f"{_SHARDING}, or {_SHARDED_STATE}"),
    "parameter_server": (
        "updates asynchronously, so that the result depends on timing",
        "tf.distribute with your own training loop",
    ),
    "central_storage": ("keeps variables in the host's memory, where Keras does not train", 'strategy("auto")'),
    "tpu": ("is for TPUs; tfopt is for GPUs", "tf.distribute.TPUStrategy, or Keras on JAX"),
}


@dataclass(slots=True)
class _Made:
    """This process's only strategy: a second one would count collective operations from the start again."""

    kind: str
    strategy: tf.distribute.Strategy
    cluster: Cluster
    notes: list[str]


_made: list[_Made] = []


def strategy(kind: str = "auto", *, start_seconds: float = 60.0, check_data: bool = True) -> tf.distribute.Strategy:
    """Returns the tf.distribute strategy for where this process runs, with Keras' defects under it repaired.

    Call it once, before TensorFlow does anything else, and create and compile the model in its scope. Batch sizes, in
    `fit` and in datasets, are global: for all replicas together. In a cluster it waits until all workers have joined,
    then watches them: if a worker is killed, stops or hangs, the others name it on stderr and exit with code 75 within
    90 s, so that the scheduler can restart them. If its steps differed from theirs, or it failed because of its data,
    they exit with 1.

    Args:
        kind: "auto": all workers of the cluster in the environment, otherwise all GPUs of this machine, otherwise one
            device. "one_device", "mirrored" and "multi_worker" accept nothing else.
        start_seconds: How long to wait for the other workers. Default: 60.
        check_data: Whether `fit` in several processes compares the workers' data before the first step, and counts the
            examples of each epoch; it raises `tfopt.errors.PipelineError` if some would be left out or trained on
            twice. Default: True.

    Returns:
        MultiWorkerMirroredStrategy, MirroredStrategy or, on one device, TensorFlow's default strategy, as if there were
        none. A second call returns the same strategy.

    Raises:
        ValueError: If `kind` is unknown.
        tfopt.errors.ClusterError: If the cluster is described wrongly, another job has its ports, this host has fewer
            GPUs than workers, or what `kind` requires is missing. Restarting would not help.
        tfopt.errors.UnsupportedError: If Keras on TensorFlow cannot do this kind, or tfopt's repairs do not know this
            version of Keras.
        SystemExit: With code 75 if a worker, named on stderr, did not join within `start_seconds`.

    Example:
        >>> strategy = tfopt.distribute.strategy("auto")
        >>> with strategy.scope():
        ...     model = make_model()
        ...     model.compile("adam", "mse")
    """
    if kind not in KINDS:
        raise _unusable(kind)
    _refuse_keras_distribution()
    if not _made:
        _made.append(_make(kind, start_seconds, check_data))
    elif kind not in ("auto", _made[0].kind):
        raise ClusterError(
            f"Expected one strategy per process. Found {kind!r} after {_made[0].kind!r}. Start a process for each."
        )
    return _made[0].strategy


def explain() -> str:
    """Returns what `strategy` found, what it chose and why; before that call, what `resolve` finds.

    Example:
        >>> print(tfopt.distribute.explain())
        one process
          arguments: none
          TF_CONFIG: not set
    """
    return "\n".join([_made[0].cluster.explain(), *_made[0].notes]) if _made else resolve().explain()


def _unusable(kind: object) -> Exception:
    """Returns the error for a kind that is unknown, or that tfopt does not offer."""
    name = re.sub("[-_ ]|stage", "", kind.lower()) if isinstance(kind, str) else ""
    unsupported = {known.replace("_", ""): texts for known, texts in _UNSUPPORTED.items()}
    if name not in unsupported:
        return unknown_name("kind of strategy", kind, KINDS)
    what, instead = unsupported[name]
    return UnsupportedError(
        "Expected a strategy that trains synchronously with the whole model on each device. Found "
        f"{kind!r}, which {what}. Keras on TensorFlow has no such strategy; use {instead}."
    )


def _refuse_keras_distribution() -> None:
    found = keras.distribution.distribution()
    if found is not None:
        raise UnsupportedError(
            f"Expected no keras.distribution on TensorFlow. Found {type(found).__name__}, which does nothing there: "
            "each device would train the whole model on all data. Remove it with "
            "keras.distribution.set_distribution(None)."
        )


def _make(kind: str, start_seconds: float, check_data: bool) -> _Made:
    cluster = resolve()
    if kind == "multi_worker" and len(cluster.workers) < 2:
        raise ClusterError(
            f"Expected a cluster of several workers. Found {cluster}. Start the script with "
            "python -m tfopt.distribute.launch -n 2, or set TF_CONFIG in each worker."
        )
    if len(cluster.workers) > 1 and kind in ("auto", "multi_worker"):
        try:
            return _multi_worker(cluster, start_seconds, check_data)
        except MissingPeerError as error:
            sys.stderr.write(f"tfopt: {error}\n")
            raise SystemExit(RESTART) from error
    devices = _devices() if kind != "one_device" else []
    if kind == "mirrored" and len(devices) < 2:
        raise ClusterError(
            f"Expected several GPUs. Found {len(devices)} device. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
            'strategy("auto"), which trains on one device too.'
        )
    if len(devices) < 2:
        repairs.install(*repairs.ONE_DEVICE)
        return _Made("one_device", tf.distribute.get_strategy(), cluster, ["one device: no strategy"])
    repairs.install(*repairs.REPLICAS)
    made = tf.distribute.MirroredStrategy(devices)
    return _Made("mirrored", made, cluster, [f"mirrored on {', '.join(devices)}"])


def _devices() -> list[str]:
    """All GPUs or, without any, the logical CPU devices that stand in for them in tests."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name.removeprefix("/device:") for device in found]


def _multi_worker(cluster: Cluster, start_seconds: float, check_data: bool) -> _Made:
    check_host(cluster, deadline_seconds=start_seconds)
    visible = visible_devices(os.environ, cluster)
    if visible.value is not None:
        os.environ[VISIBLE] = visible.value
        os.environ[ASSIGNED] = "1"  # otherwise a second call, after an error, would divide it again
    used = hardware.gpus()
    binding = bind_cpus(used)
    pool_size, threads_reason = threads(cluster, binding)
    options, reasons = communication(cluster, len(used))
    repairs.install(*repairs.REPLICAS, "shared_files")
    if check_data:
        DATA_CHECK.install()
    try:
        # These fail if it is too late for a strategy: do that before the other workers proceed.
        tf.config.threading.set_intra_op_parallelism_threads(pool_size)
        tf.config.threading.set_inter_op_parallelism_threads(pool_size)
        watch = Watch.start(cluster, deadline_seconds=start_seconds)
        count_progress(deadline=watch.intervals.progress_seconds is not None)
        os.environ["TF_CONFIG"] = json.dumps(cluster.tf_config())
        made = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        raise ClusterError(
            f"Expected TensorFlow to start with the strategy. Found: {str(error).rstrip('.')}. What to do: call "
            "tfopt.distribute.strategy() before you create tensors or models, or list devices."
        ) from error
    restore_sigterm()
    if tf.compat.v1.get_seed(None) == (None, None):
        tf.random.set_seed(watch.seed)  # else each worker would shuffle differently and see the others' examples
    notes = [str(visible), f"CPUs: {binding}", f"threads: {threads_reason}", *reasons]
    return _Made("multi_worker", made, cluster, notes)


def communication(cluster: Cluster, gpus: int) -> tuple[tf.distribute.experimental.CommunicationOptions, list[str]]:
    """Chooses how a cluster's workers perform the all-reduce if this one uses `gpus` GPUs; also returns the reasons."""
    several_hosts = cluster.local_workers < len(cluster.workers)
    pack_bytes = 0  # all in one
    if gpus:
        implementation, why = "NCCL", "the fastest between GPUs, within a host and across hosts"
    else:
        implementation, why = "RING", "NCCL does not run on CPUs"
    if gpus and several_hosts:
        # TensorFlow's guide: with packs, the transfer begins while gradients are still being computed.
        pack_bytes = 32 * 2**20
        packs = "gradients in packs of 32 MiB: the first are sent while others are being computed"
    elif gpus:
        packs = "gradients in one pack: within a host latency counts more than overlap"
    else:
        packs = "gradients in one pack: over a ring of CPUs each pack costs another round"
    limit = "no time limit: the watchdog ends this worker if a peer is lost, and it waits for slow peers"
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=pack_bytes,
        implementation=tf.distribute.experimental.CommunicationImplementation(implementation),
    )
    return options, [f"{implementation}: {why}", packs, limit]
