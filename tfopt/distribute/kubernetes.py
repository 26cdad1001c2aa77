"""Kubernetes: the variable TFOPT_WORKERS, in which the pods of an indexed Job or a JobSet are told each other's names.

Kubernetes tells a pod its own name, and neither how many others there are nor what they are called. One entry in the
manifest does:

    env:
      - name: TFOPT_WORKERS
        value: train-[0-3].train:2222   # <Job>-[0-<completions - 1>].<headless Service>:<port>

It reads `[0-3]` as Slurm does. The names are in the order of the ranks, and a pod finds itself by its HOSTNAME.
"""

from collections.abc import Mapping

from tfopt.distribute.addresses import brief, parse_address, wrong
from tfopt.distribute.cluster import Cluster
from tfopt.distribute.hostlist import expand
from tfopt.errors import ClusterError
from tfopt.text import listed

SOURCE = "Kubernetes"
WORKERS = "TFOPT_WORKERS"

_FORM = "an indexed Job: <Job>-[0-<completions - 1>].<Service>:2222; a JobSet: <JobSet>-<job>-[0-…]-[0-…].<JobSet>:2222"


def from_kubernetes(environ: Mapping[str, str]) -> Cluster | str:
    """Reads TFOPT_WORKERS, and finds this pod in it by HOSTNAME.

    Returns:
        The cluster, or why there is none to read: this is no pod, or one whose manifest does not set the variable.

    Raises:
        ClusterError: The variable is there and wrong, or this pod is not in it.

    Example:
        >>> print(from_kubernetes({"TFOPT_WORKERS": "train-[0-1].train:2222", "HOSTNAME": "train-1"}))
        worker 1 (train-1.train:2222) of 2 workers, from Kubernetes
    """
    text = environ.get(WORKERS, "").strip()
    if not text:
        return _why_none(environ)
    try:
        workers = expand(text)
    except ClusterError as error:
        found = f"{brief(text)}, which is no such list"
        raise wrong(f"{WORKERS} to list the pods' addresses", found, f"write, for {_FORM}") from error
    return Cluster(SOURCE, workers, _index(workers, environ.get("HOSTNAME", "")))


def _index(workers: tuple[str, ...], hostname: str) -> int:
    hosts = [parse_address(worker, whose=f"worker {rank} ({WORKERS})").host for rank, worker in enumerate(workers)]
    pod = hostname.partition(".")[0]  # where setHostnameAsFQDN is set, more follows
    ranks = [rank for rank, host in enumerate(hosts) if host.partition(".")[0] == pod]
    if len(ranks) == 1:
        return ranks[0]
    found = f"it {len(ranks)} times" if ranks else listed(hosts, 4)
    raise wrong(
        f"HOSTNAME, {brief(hostname)}, to be the first part of one name in {WORKERS}",
        found,
        f"list every pod once, for {_FORM}. With hostNetwork, HOSTNAME is the node's: set it in env to the pod's",
    )


def _why_none(environ: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return f"{SOURCE}: not in a pod"
    index = environ.get("JOB_COMPLETION_INDEX")
    where = "in a pod" if index is None else f"in pod {brief(index)} of an indexed Job"
    return f"{SOURCE}: {where}, and {WORKERS} is not set: it trains alone"
