"""One call in front of the model: the same script on one device, on all of a machine, and on many machines."""

import json
import os
import sys
from dataclasses import dataclass, field

import tensorflow as tf

from tfopt import hardware, repairs
from tfopt.distribute.affinity import bind_cpus, threads
from tfopt.distribute.barrier import MissingPeerError
from tfopt.distribute.checking import check_host
from tfopt.distribute.cluster import Cluster
from tfopt.distribute.communication import communication
from tfopt.distribute.devices import ASSIGNED, NAME, visible_devices
from tfopt.distribute.exit_codes import RESTART
from tfopt.distribute.refusals import refuse, refuse_distribution
from tfopt.distribute.resolving import resolve
from tfopt.distribute.sigterm import restore_sigterm
from tfopt.distribute.watch import Watch
from tfopt.errors import ClusterError, unknown_name

KINDS = ("auto", "one_device", "mirrored", "multi_worker")


@dataclass(slots=True)
class _Made:
    """The strategy of this process: a second one would count its collective operations from the start again."""

    kind: str
    strategy: tf.distribute.Strategy
    cluster: Cluster
    notes: list[str] = field(default_factory=list)


_made: list[_Made] = []


def strategy(kind: str = "auto", *, start_seconds: float = 60.0) -> tf.distribute.Strategy:
    """Returns the tf.distribute strategy for where this process runs, with Keras' defects under it repaired.

    Call it once, before anything else of TensorFlow, and make and compile the model in its scope. The batch size of
    `fit` and of datasets is the global one: of all replicas together. In a cluster of several workers it waits until
    all of them are there, and watches them from then on: a worker that is killed, stops or hangs ends the others
    within 90 s, with its name on stderr and exit code 75, for the scheduler to start them again.

    Args:
        kind: "auto": several workers if the environment names them, else all GPUs of this machine, else one device.
            "one_device", "mirrored" or "multi_worker" insist.
        start_seconds: How long to wait for the other workers.

    Returns:
        MultiWorkerMirroredStrategy, MirroredStrategy, or on one device TensorFlow's default strategy, under which
        Keras trains as without any. A second call returns the same.

    Raises:
        ValueError: There is no such kind.
        tfopt.errors.ClusterError: The cluster is described wrongly, another job has its ports, there are fewer GPUs
            than workers on this host, or what `kind` insists on is not there. Starting again would not help.
        tfopt.errors.UnsupportedError: It is a kind that Keras on TensorFlow cannot do, or this Keras is not one that
            tfopt's repairs know.
        SystemExit: With code 75: a worker did not come within `start_seconds`; which one stands on stderr.

    Example:
        >>> strategy = tfopt.distribute.strategy("auto")
        >>> with strategy.scope():
        ...     model = make_model()
        ...     model.compile("adam", "mse")
    """
    refuse(kind)
    if kind not in KINDS:
        raise unknown_name("kind of strategy", kind, KINDS)
    refuse_distribution()
    if not _made:
        _made.append(_make(kind, start_seconds))
    elif kind not in ("auto", _made[0].kind):
        raise ClusterError(
            f"Expected one strategy in a process. Found {kind!r} after {_made[0].kind!r}. Start a process for each."
        )
    return _made[0].strategy


def explain() -> str:
    """Returns what `strategy` found, what it chose and why; before it was called, what would be resolved.

    Example:
        >>> print(tfopt.distribute.explain())
        one process
          arguments: none
          TF_CONFIG: not set
    """
    return "\n".join([_made[0].cluster.explain(), *_made[0].notes]) if _made else resolve().explain()


def _make(kind: str, start_seconds: float) -> _Made:
    cluster = resolve()
    if kind == "multi_worker" and len(cluster.workers) < 2:
        raise ClusterError(
            f"Expected a cluster of several workers. Found {cluster}. Start the script with "
            "python -m tfopt.distribute.launch -n 2, or set TF_CONFIG in each worker."
        )
    if len(cluster.workers) > 1 and kind in ("auto", "multi_worker"):
        try:
            return _of_workers(cluster, start_seconds)
        except MissingPeerError as error:
            sys.stderr.write(f"tfopt: {error}\n")
            raise SystemExit(RESTART) from error
    devices = _devices() if kind != "one_device" else []
    if kind == "mirrored" and len(devices) < 2:
        raise ClusterError(
            f"Expected several GPUs. Found {len(devices)} device. Look at nvidia-smi and CUDA_VISIBLE_DEVICES, or take "
            'strategy("auto"), which trains on one device too.'
        )
    if len(devices) < 2:
        return _Made("one_device", tf.distribute.get_strategy(), cluster, ["one device: as without a strategy"])
    repairs.install(*repairs.REPLICAS)
    made = tf.distribute.MirroredStrategy(devices)
    return _Made("mirrored", made, cluster, [f"mirrored on {', '.join(devices)}"])


def _devices() -> list[str]:
    """All GPUs; without any, the logical CPU devices, which stand in for them in tests."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name.removeprefix("/device:") for device in found]


def _of_workers(cluster: Cluster, start_seconds: float) -> _Made:
    check_host(cluster, deadline_seconds=start_seconds)
    visible = visible_devices(os.environ, cluster)
    if visible.value is not None:
        os.environ[NAME] = visible.value
        os.environ[ASSIGNED] = "1"  # a second call, after an error, would divide it again
    used = hardware.gpus()
    binding = bind_cpus(used)
    pools = threads(cluster, binding=binding)
    chosen = communication(cluster, len(used))
    repairs.install(*repairs.REPLICAS)
    try:
        # Before the others go on without this one: both fail if it is too late for a strategy.
        tf.config.threading.set_intra_op_parallelism_threads(pools.intra_op)
        tf.config.threading.set_inter_op_parallelism_threads(pools.inter_op)
        watch = Watch.start(cluster, deadline_seconds=start_seconds)
        os.environ["TF_CONFIG"] = json.dumps(cluster.tf_config())
        made = tf.distribute.MultiWorkerMirroredStrategy(communication_options=chosen.options())
    except RuntimeError as error:
        raise ClusterError(
            f"Expected TensorFlow to start with the strategy. Found: {str(error).rstrip('.')}. What to do: call "
            "tfopt.distribute.strategy() before anything else of TensorFlow: tensors, models, lists of devices."
        ) from error
    restore_sigterm()
    if tf.compat.v1.get_seed(None) == (None, None):
        tf.random.set_seed(watch.seed)  # or each worker would shuffle its own way, and train on what others have
    notes = [str(visible), f"CPUs: {binding}", f"threads: {pools}", *chosen.reasons]
    return _Made("multi_worker", made, cluster, notes)
