"""Kubernetes: reads the pods of an indexed Job or a JobSet from TFOPT_WORKERS.

A pod knows its own name, but neither the number nor the names of the others. One entry in the manifest lists them in
rank order, and each pod finds itself by its HOSTNAME:

    env:
      - name: TFOPT_WORKERS
        value: train-[0-3].train:2222   # <Job>-[0-<completions - 1>].<headless Service>:<port>
"""

from collections.abc import Mapping

from tfopt.distribute.cluster.membership import Cluster, brief, cluster_error, parse_address
from tfopt.distribute.cluster.slurm import expand_hosts
from tfopt.errors import ClusterError
from tfopt.text import listed

SOURCE = "Kubernetes"
WORKERS = "TFOPT_WORKERS"

_FORM = "an indexed Job: <Job>-[0-<completions - 1>].<Service>:2222; a JobSet: <JobSet>-<job>-[0-…]-[0-…].<JobSet>:2222"


def from_kubernetes(environ: Mapping[str, str]) -> Cluster | str:
    """Returns the cluster in TFOPT_WORKERS, or one line that says why there is none.

    Raises:
        ClusterError: If the variable is set and wrong, or does not list this pod.

    Example:
        >>> print(from_kubernetes({"TFOPT_WORKERS": "train-[0-1].train:2222", "HOSTNAME": "train-1"}))
        worker 1 (train-1.train:2222) of 2 workers, from Kubernetes
    """
    if WORKERS not in environ:
        if "KUBERNETES_SERVICE_HOST" not in environ:
            return f"{SOURCE}: not in a pod"
        index = environ.get("JOB_COMPLETION_INDEX")
        where = "in a pod" if index is None else f"in pod {brief(index)} of an indexed Job"
        return f"{SOURCE}: {where}, and {WORKERS} is not set: it trains alone"
    text = environ[WORKERS].strip()
    try:
        workers = expand_hosts(text)
    except ClusterError as error:
        found = f"{brief(text)}, which is not such a list"
        raise cluster_error(f"{WORKERS} to list the pods' addresses", found, f"write, for {_FORM}") from error
    return Cluster(SOURCE, workers, _index(workers, environ.get("HOSTNAME", "")))


def _index(workers: tuple[str, ...], hostname: str) -> int:
    hosts = [parse_address(worker, whose=f"worker {rank} ({WORKERS})").host for rank, worker in enumerate(workers)]
    pod = hostname.partition(".")[0]  # with setHostnameAsFQDN the domain follows
    ranks = [rank for rank, host in enumerate(hosts) if host.partition(".")[0] == pod]
    if len(ranks) == 1:
        return ranks[0]
    raise cluster_error(
        f"HOSTNAME, {brief(hostname)}, to be the first part of one name in {WORKERS}",
        f"it {len(ranks)} times" if ranks else listed(hosts, 4),
        f"list every pod once, for {_FORM}. With hostNetwork, HOSTNAME is the node's: set it to the pod's in env",
    )
