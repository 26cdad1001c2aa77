"""How the workers of a cluster send their gradients to each other."""

from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfopt.distribute.cluster import Cluster

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Communication:
    """What tf.distribute is told about the all-reduce.

    Attributes:
        implementation: "NCCL" between GPUs, "RING" between CPUs.
        bytes_per_pack: Gradients are sent in packs of about this size; 0: all in one.
        reasons: Why, a line for each.
    """

    implementation: str
    bytes_per_pack: int
    reasons: tuple[str, ...]

    def options(self) -> tf.distribute.experimental.CommunicationOptions:
        """The same as TensorFlow takes it."""
        return tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack,
            implementation=tf.distribute.experimental.CommunicationImplementation(self.implementation),
        )

    def __str__(self) -> str:
        return "\n".join(self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"reasons": list(self.reasons)}


def communication(cluster: Cluster, gpus: int) -> Communication:
    """Returns how the workers of a cluster should communicate.

    Args:
        cluster: From `resolve()`.
        gpus: How many GPUs this worker uses.

    Example:
        >>> print(communication(Cluster("arguments", ("a:1", "b:1"), 0), gpus=0))
        RING: between CPUs there is no NCCL
        gradients in one pack: over a ring of CPUs each pack is a round of its own
        no time limit: the watchdog ends this worker when a peer is lost, and slow peers are waited for
    """
    several_hosts = cluster.local_workers < len(cluster.workers)
    if gpus:
        implementation, why = "NCCL", "between GPUs it is the fastest, within a host and across"
    else:
        implementation, why = "RING", "between CPUs there is no NCCL"
    if gpus and several_hosts:
        # TensorFlow's guide: packs let the transfer begin while gradients are still computed.
        pack, packs = 32 * _MIB, "gradients in packs of 32 MiB: the first are on the network while others are computed"
    elif gpus:
        pack, packs = 0, "gradients in one pack: within a host latency counts more than overlap"
    else:
        pack, packs = 0, "gradients in one pack: over a ring of CPUs each pack is a round of its own"
    limit = "no time limit: the watchdog ends this worker when a peer is lost, and slow peers are waited for"
    return Communication(implementation, pack, (f"{implementation}: {why}", packs, limit))
