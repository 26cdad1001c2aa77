"""TF_CONFIG: reads the variable in which TensorFlow, Kubeflow, SageMaker and Ray describe a cluster.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}

The chief, if there is one, has rank 0, before the workers. Other keys are ignored.
"""

import json
from collections.abc import Mapping
from typing import Any

from tfopt.distribute.cluster.membership import Cluster, brief, check_index, cluster_error

NAME = "TF_CONFIG"

# Jobs that take no part in the all-reduce, and what to do instead.
_ALTERNATIVES = {
    "ps": "parameter servers update asynchronously, which tfopt does not do: make all of them workers, or use "
    "tf.distribute.ParameterServerStrategy with your own training loop, without tfopt.distribute",
    "evaluator": "an evaluator does not train: start it without TF_CONFIG and let it evaluate the chief's checkpoints",
}

_WRAPPED = ("cluster", "chief", "master", "worker", *_ALTERNATIVES)  # "cluster": in other letters


def from_tf_config(environ: Mapping[str, str]) -> Cluster | str:
    """Returns the cluster in TF_CONFIG, or one line that says why there is none; raises ClusterError if it is wrong."""
    text = environ.get(NAME, "")
    if not text.strip():
        return f"{NAME}: not set" if NAME not in environ else f"{NAME}: set, and empty"
    document = _parse(text)
    unwrapped = [key for key in document if key.lower() in _WRAPPED and key != "cluster"]
    if unwrapped and "cluster" not in document:  # ignored, each worker would train alone
        raise cluster_error(
            f"the jobs of {NAME} under the key 'cluster'",
            f"{brief(unwrapped[0])} at the top, and no 'cluster'",
            'write {"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}',
        )
    jobs = _object(document.get("cluster"), "cluster")
    task = _object(document.get("task"), "task")
    if not jobs and not task:
        return f"{NAME}: set, and names no cluster"
    rpc_layer = document.get("rpc_layer")
    if rpc_layer not in (None, "", "grpc"):
        raise cluster_error(f"rpc_layer of {NAME} to be 'grpc', or left out", brief(rpc_layer), "leave it out")
    return _cluster(jobs, task)


def _cluster(jobs: dict[str, Any], task: dict[str, Any]) -> Cluster:
    for job in jobs:
        if job != "evaluator":  # a separate process that no worker waits for
            _check_job(job, "cluster")
    chief, worker = (_list(jobs.get(job, []), f"cluster.{job}") for job in ("chief", "worker"))
    if len(chief) > 1:
        remedy = "list the others under cluster.worker"
        raise cluster_error("at most one chief", f"{len(chief)} in cluster.chief", remedy)
    _check_job(task.get("type"), "task.type")
    is_chief = task["type"] == "chief"
    own = chief if is_chief else worker
    if not own:
        where = f"cluster.{task['type']} in {NAME} to list this process, since that is its task.type"
        raise cluster_error(where, "nothing", "list every process under its job")
    index = check_index(task.get("index"), len(own), f"task.index of {NAME}, a {task['type']},")
    return Cluster(NAME, tuple(chief + worker), index if is_chief else len(chief) + index)


def _parse(text: str) -> dict[str, Any]:
    try:
        return _object(json.loads(text), "")
    except (ValueError, RecursionError) as error:
        fault = str(error) or "nested too deeply"
        raise cluster_error(
            f"{NAME} to hold JSON", f"{brief(text)}; {fault}", "correct it; use double quotes"
        ) from error


def _check_job(job: object, where: str) -> None:
    if isinstance(job, str) and job in ("chief", "worker"):
        return
    if isinstance(job, str) and job in _ALTERNATIVES:
        raise cluster_error(f"workers, and at most a chief, in {NAME}", f"the job {job!r}", _ALTERNATIVES[job])
    remedy = "list every training process under cluster.worker, and say in task which of them this one is"
    raise cluster_error(f"{where} of {NAME} to name the job 'worker' or 'chief'", brief(job), remedy)


def _object(value: object, key: str) -> dict[str, Any]:
    """Returns a JSON object; null or a missing key counts as an empty one."""
    if value is None and key:
        return {}
    if isinstance(value, dict):
        return value
    where = f"{key!r} in {NAME}" if key else NAME
    raise cluster_error(f"{where} to be a JSON object, {{…}}", brief(value), "write it as TensorFlow's guide shows")


def _list(value: object, key: str) -> list[Any]:
    if isinstance(value, list):
        return value
    remedy = "put it in brackets: ['host:port', …]"
    raise cluster_error(f"{key} in {NAME} to be a list of addresses", brief(value), remedy)
