"""Slurm: who trains together in the step that srun started, as its variables tell it in every task."""

import re
from collections.abc import Mapping, Sequence

from tfopt.distribute.addresses import brief, wrong
from tfopt.distribute.cluster import MOST_WORKERS, Cluster
from tfopt.distribute.hostlist import MOST_HOSTS, expand

# Below Linux's ephemeral ports (ip_local_port_range, from 32768 on), which any program may hold at the moment.
_FIRST_PORT, _PORTS = 20_000, 12_768
_PORTS_A_JOB = 16  # tasks up to which a job does not come near to its neighbours
_JOBS_A_STEP = 331  # further apart than jobs that run on a node at the same time

_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_MOST_NUMBER = 2**32 - 1  # Slurm's own
_HET_NODES = "SLURM_JOB_NODELIST_HET_GROUP_"


def from_slurm(environ: Mapping[str, str]) -> Cluster | str:
    """Reads the variables that srun sets in each task of a step.

    The shell of sbatch or salloc is one process, as is a step of one task. Addresses are the nodes' names, with the
    ports that Slurm has reserved for the step (srun --resv-ports, MpiParams), if they are enough, else with ports from
    20000 to 32767 that follow from the job and the step.

    Returns:
        The cluster, or why there is none.

    Raises:
        ClusterError: A variable of the step is missing or wrong, or does not tell where each task runs: a step with
            --distribution=arbitrary, or over several components of a heterogeneous job.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        if "SLURM_JOB_ID" not in environ:
            return "Slurm: not in a job"
        return "Slurm: in a job, but not in a step: srun did not start this process"
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1, MOST_WORKERS)
    if tasks == 1:
        return "Slurm: a step of one task"
    _refuse_components(environ)
    hosts = expand(_text(environ, "SLURM_STEP_NODELIST"))
    places = _places(environ, _tasks_per_node(environ, len(hosts), tasks))
    rank = _number(environ, "SLURM_PROCID", 0, tasks - 1)
    _check_own_place(environ, hosts, places, rank)
    ports = _ports(environ, places)
    return Cluster("Slurm", tuple(f"{hosts[node]}:{port}" for (node, _), port in zip(places, ports, strict=True)), rank)


def _refuse_components(environ: Mapping[str, str]) -> None:
    """A step over several components lists its nodes in another order than their tasks."""
    components = {value for name, value in environ.items() if name.startswith(_HET_NODES)}
    if "SLURM_HET_SIZE" in environ and environ.get("SLURM_JOB_NODELIST") not in components:
        raise wrong(
            "a step within one component of a heterogeneous job",
            "one over several components, whose tasks Slurm's variables do not place",
            "give all workers to one component and start them with srun --het-group=N",
        )


def _tasks_per_node(environ: Mapping[str, str], nodes: int, tasks: int) -> list[int]:
    """Reads "2(x3),1": two tasks on each of three nodes, and one on the fourth."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = _text(environ, name)
    found = [_TASKS.fullmatch(part) for part in text.split(",", MOST_HOSTS)]
    counts = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    if len(counts) < len(found) or any(count < 1 for count, _ in counts):
        raise wrong(f"{name} in the form 2(x3),1", brief(text), _AS_SET)
    if sum(times for _, times in counts) != nodes or sum(count * times for count, times in counts) != tasks:
        expected = f"{name} to place the {tasks} tasks of SLURM_STEP_NUM_TASKS on the {nodes} nodes of"
        raise wrong(f"{expected} SLURM_STEP_NODELIST", brief(text), _AS_SET)
    return [count for count, times in counts for _ in range(times)]


def _places(environ: Mapping[str, str], counts: Sequence[int]) -> list[tuple[int, int]]:
    """The node of each task, by rank, and its number among the tasks there."""
    # Tasks go round the nodes in portions of this size. What follows a colon or comma is about sockets and cores.
    distribution = re.split("[:,]", environ.get("SLURM_DISTRIBUTION", "block"))[0]
    if distribution == "block":
        portion = max(counts)
    elif distribution == "cyclic":
        portion = 1
    elif distribution == "plane":
        portion = _number(environ, "SLURM_DIST_PLANESIZE", 1, _MOST_NUMBER)
    else:
        raise wrong(
            "SLURM_DISTRIBUTION to be block, cyclic or plane",
            f"{brief(distribution)}, with which Slurm's variables do not tell where each task runs",
            "start the step with srun --distribution=block, or set TF_CONFIG in each task",
        )
    rounds = range(0, max(counts), portion)
    return [
        (node, local)
        for first in rounds
        for node, count in enumerate(counts)
        for local in range(first, min(first + portion, count))
    ]


def _check_own_place(
    environ: Mapping[str, str], hosts: Sequence[str], places: Sequence[tuple[int, int]], rank: int
) -> None:
    """Compares the place that was worked out with what Slurm tells this task of its own, so far as it does."""
    node, local = places[rank]
    here = ",".join(str(other) for other, place in enumerate(places) if place[0] == node)
    expected = {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_GTIDS": here,
        "SLURMD_NODENAME": hosts[node],
    }
    unlike = [name for name, value in expected.items() if environ.get(name, value) != value]
    if unlike:
        told = ", ".join(f"{name}={brief(environ[name])} and not {brief(expected[name])}" for name in unlike)
        raise wrong(
            f"task {rank} of the step on the node where SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE and "
            "SLURM_DISTRIBUTION place it",
            told,
            "start the step with srun --distribution=block, and let nothing in between change Slurm's variables",
        )


def _ports(environ: Mapping[str, str], places: Sequence[tuple[int, int]]) -> list[int]:
    """The port of each task, by rank: the same list in every task."""
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    if reserved:
        if not re.fullmatch("[0-9,-]+", reserved):
            raise wrong("SLURM_STEP_RESV_PORTS to list ports, 12000-12003,12007", brief(reserved), _AS_SET)
        ports = expand(f"[{reserved}]")  # the same ports on every node
        if max(local for _, local in places) < len(ports):
            return [int(ports[local]) for _, local in places]
    job = _number(environ, "SLURM_JOB_ID", 0, _MOST_NUMBER)
    step = _number(environ, "SLURM_STEP_ID", 0, _MOST_NUMBER)
    first = (job + _JOBS_A_STEP * step) * _PORTS_A_JOB
    # By rank, not by the number on the node: Slurm's nodes may share a machine, as they do in tests.
    return [_FIRST_PORT + (first + rank) % _PORTS for rank in range(len(places))]


_AS_SET = "let nothing between srun and this process change Slurm's variables"


def _text(environ: Mapping[str, str], name: str) -> str:
    if name in environ:
        return environ[name]
    raise wrong(f"{name}, which srun sets in every task of a step", "no such variable", _AS_SET)


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = _text(environ, name)
    if re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most:
        return int(text)
    raise wrong(f"{name} to be an integer from {least} to {most}", brief(text), _AS_SET)
