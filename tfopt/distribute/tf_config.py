"""The variable TF_CONFIG: who trains together, as TensorFlow's own clusters, Kubeflow, SageMaker and Ray write it.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}

A chief, where there is one, is of rank 0, and the workers follow. Keys that are not named here are ignored.
"""

import json
from collections.abc import Mapping
from typing import Any

from tfopt.distribute.addresses import brief, wrong
from tfopt.distribute.cluster import Cluster, check_index

NAME = "TF_CONFIG"

# Jobs that do not take part in the all-reduce, and where to go with them.
_ELSEWHERE = {
    "ps": "parameter servers update asynchronously, which tfopt does not do: name all of them workers, or use "
    "tf.distribute.ParameterServerStrategy with a training loop of your own, without tfopt.distribute",
    "evaluator": "an evaluator does not train: start it without TF_CONFIG and let it evaluate the checkpoints that the "
    "chief writes",
}


def from_tf_config(environ: Mapping[str, str]) -> Cluster | str:
    """Reads TF_CONFIG.

    Returns:
        The cluster, or why there is none to read: the variable is not set, or names neither a cluster nor a task.

    Raises:
        ClusterError: The variable is there and wrong.
    """
    text = environ.get(NAME, "")
    if not text.strip():
        return f"{NAME}: not set" if NAME not in environ else f"{NAME}: set, and empty"
    document = _parse(text)
    jobs = _object(document.get("cluster"), "cluster")
    task = _object(document.get("task"), "task")
    if not jobs and not task:
        return f"{NAME}: set, and names no cluster"
    _check_rpc_layer(document.get("rpc_layer"))
    return _cluster(jobs, task)


def _cluster(jobs: dict[str, Any], task: dict[str, Any]) -> Cluster:
    for job in jobs:
        if job != "evaluator":  # another process's, and none of the workers waits for it
            _check_job(job, "cluster")
    chief, worker = (_list(jobs.get(job, []), f"cluster.{job}") for job in ("chief", "worker"))
    if len(chief) > 1:
        raise wrong("at most one chief", f"{len(chief)} in cluster.chief", "list the others under cluster.worker")
    _check_job(task.get("type"), "task.type")
    is_chief = task["type"] == "chief"
    own = chief if is_chief else worker
    if not own:
        where = f"cluster.{task['type']} in {NAME} to list this process, whose task.type it is"
        raise wrong(where, "nothing", "list every process under its job")
    index = check_index(task.get("index"), len(own), f"task.index of {NAME}, a {task['type']},")
    return Cluster(NAME, tuple(chief + worker), index if is_chief else len(chief) + index)


def _parse(text: str) -> dict[str, Any]:
    try:
        return _object(json.loads(text), "")
    except (ValueError, RecursionError) as error:
        fault = str(error) or "nested too deeply"
        raise wrong(f"{NAME} to hold JSON", f"{brief(text)}; {fault}", "correct it; the quotes are double") from error


def _check_job(job: object, where: str) -> None:
    if isinstance(job, str) and job in ("chief", "worker"):
        return
    if isinstance(job, str) and job in _ELSEWHERE:
        raise wrong(f"workers, and at most a chief, in {NAME}", f"the job {job!r}", _ELSEWHERE[job])
    remedy = "list every process that trains under cluster.worker, and say in task which of them this one is"
    raise wrong(f"{where} of {NAME} to name the job 'worker' or 'chief'", brief(job), remedy)


def _check_rpc_layer(layer: object) -> None:
    if layer not in (None, "", "grpc"):
        raise wrong(f"rpc_layer of {NAME} to be 'grpc', or left out", brief(layer), "leave it out")


def _object(value: object, key: str) -> dict[str, Any]:
    """A JSON object; null or a missing key is an empty one."""
    if value is None and key:
        return {}
    if isinstance(value, dict):
        return value
    where = f"{key!r} in {NAME}" if key else NAME
    raise wrong(f"{where} to be a JSON object, {{…}}", brief(value), "write it as TensorFlow's guide shows it")


def _list(value: object, key: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise wrong(f"{key} in {NAME} to be a list of addresses", brief(value), "put it into brackets: ['host:port', …]")
