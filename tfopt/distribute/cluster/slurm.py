"""Slurm: reads the tasks of a step from the variables that srun sets in each of them, and expands its host lists."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from tfopt.distribute.cluster.membership import MAX_WORKERS, Cluster, brief, cluster_error
from tfopt.errors import ClusterError

# Below Linux's ephemeral ports (ip_local_port_range starts at 32768), which any program may hold at any moment.
_FIRST_PORT, _PORTS = 20_000, 12_768
_PORTS_PER_JOB = 16  # consecutive jobs of up to this many tasks do not collide
_JOBS_PER_STEP = 331  # more than the jobs that run on a node at the same time

_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_MAX_NUMBER = 2**32 - 1  # Slurm's own
_HET_NODES = "SLURM_JOB_NODELIST_HET_GROUP_"
_AS_SET = "let nothing between srun and this process change Slurm's variables"

# Slurm's own limit for a range. More is a typo: n[1-999999999] would exhaust memory.
_MAX_HOSTS = 65536
_MAX_NAME_CHARACTERS = 253  # DNS

_ENTRY = r"(?:[^][,\s]|\[[^][]*\])+"
_HOST_LIST = re.compile(rf"{_ENTRY}(?:,{_ENTRY})*")
_GROUP = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def from_slurm(environ: Mapping[str, str]) -> Cluster | str:
    """Returns the cluster that srun's variables describe in each task of a step, or one line saying why there is none.

    The shell of sbatch or salloc is one process, and so is a step with one task. Hosts are the names of the nodes.
    Ports are those Slurm reserved for the step (srun --resv-ports, MpiParams) if there are enough, otherwise derived
    from the ids of job and step, from 20000 to 32767.

    Raises:
        ClusterError: If one of the step's variables is missing or wrong, or they do not say where each task runs: with
            --distribution=arbitrary, or over several components of a heterogeneous job.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        if "SLURM_JOB_ID" not in environ:
            return "Slurm: not in a job"
        _refuse_step(environ)
        return "Slurm: in a job, but not in a step: srun did not start this process"
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1, MAX_WORKERS)
    if tasks == 1:
        return "Slurm: a step of one task"
    _refuse_components(environ)
    hosts = expand_hosts(_text(environ, "SLURM_STEP_NODELIST"))
    places = _places(environ, _tasks_per_node(environ, len(hosts), tasks))
    rank = _number(environ, "SLURM_PROCID", 0, tasks - 1)
    _check_own_place(environ, hosts, places, rank)
    ports = _ports(environ, places)
    return Cluster("Slurm", tuple(f"{hosts[node]}:{port}" for (node, _), port in zip(places, ports, strict=True)), rank)


def _refuse_step(environ: Mapping[str, str]) -> None:
    """Refuses a task of a step whose number of tasks is gone: each would train alone."""
    found = [name for name in ("SLURM_STEP_ID", "SLURM_STEPID") if name in environ]
    found += ["SLURM_PROCID"] if environ.get("SLURM_PROCID", "0") != "0" else []  # in the shell of sbatch it is 0
    if found:
        raise cluster_error(
            "SLURM_STEP_NUM_TASKS, which srun sets in every task of a step",
            f"{found[0]}={brief(environ[found[0]])} without it",
            f"{_AS_SET}. In the shell of a job that was submitted from within a step, unset SLURM_STEP_ID, "
            "SLURM_STEPID and SLURM_STEP_NUM_TASKS",
        )


def _refuse_components(environ: Mapping[str, str]) -> None:
    """Refuses a step that spans several components: its node list is not in the order of its tasks."""
    components = {value for name, value in environ.items() if name.startswith(_HET_NODES)}
    if "SLURM_HET_SIZE" in environ and environ.get("SLURM_JOB_NODELIST") not in components:
        raise cluster_error(
            "a step within one component of a heterogeneous job",
            "one over several components, whose tasks Slurm's variables do not place",
            "put all workers in one component and start them with srun --het-group=N",
        )


def _tasks_per_node(environ: Mapping[str, str], nodes: int, tasks: int) -> list[int]:
    """Parses "2(x3),1": two tasks on each of three nodes and one on the fourth."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = _text(environ, name)
    found = [_TASKS.fullmatch(part) for part in text.split(",", _MAX_HOSTS)]
    counts = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    if len(counts) < len(found) or any(count < 1 for count, _ in counts):
        raise cluster_error(f"{name} in the form 2(x3),1", brief(text), _AS_SET)
    if sum(times for _, times in counts) != nodes or sum(count * times for count, times in counts) != tasks:
        expected = f"{name} to place the {tasks} tasks of SLURM_STEP_NUM_TASKS on the {nodes} nodes of"
        raise cluster_error(f"{expected} SLURM_STEP_NODELIST", brief(text), _AS_SET)
    return [count for count, times in counts for _ in range(times)]


def _places(environ: Mapping[str, str], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Each task's node and its number among the tasks there, by rank."""
    # What follows a colon or comma concerns sockets and cores.
    distribution = re.split("[:,]", environ.get("SLURM_DISTRIBUTION", "block"))[0]
    if distribution == "block":
        portion = max(counts)  # tasks are dealt to the nodes in turn, this many at a time
    elif distribution == "cyclic":
        portion = 1
    elif distribution == "plane":
        portion = _number(environ, "SLURM_DIST_PLANESIZE", 1, _MAX_NUMBER)
    else:
        raise cluster_error(
            "SLURM_DISTRIBUTION to be block, cyclic or plane",
            f"{brief(distribution)}, for which Slurm's variables do not say where each task runs",
            "start the step with srun --distribution=block, or set TF_CONFIG in each task",
        )
    return [
        (node, local)
        for first in range(0, max(counts), portion)
        for node, count in enumerate(counts)
        for local in range(first, min(first + portion, count))
    ]


def _check_own_place(
    environ: Mapping[str, str], hosts: Sequence[str], places: Sequence[tuple[int, int]], rank: int
) -> None:
    """Checks this task's computed place against what Slurm says."""
    node, local = places[rank]
    expected = {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_GTIDS": ",".join(str(other) for other, place in enumerate(places) if place[0] == node),
        "SLURMD_NODENAME": hosts[node],
    }
    wrong = [name for name, value in expected.items() if environ.get(name, value) != value]
    if wrong:
        raise cluster_error(
            f"task {rank} of the step on the node where SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE and "
            "SLURM_DISTRIBUTION place it",
            ", ".join(f"{name}={brief(environ[name])} and not {brief(expected[name])}" for name in wrong),
            "start the step with srun --distribution=block, and let nothing in between change Slurm's variables",
        )


def _ports(environ: Mapping[str, str], places: Sequence[tuple[int, int]]) -> list[int]:
    """Each task's port by rank, the same list in every task."""
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    if reserved:
        if not re.fullmatch("[0-9,-]+", reserved):
            raise cluster_error("SLURM_STEP_RESV_PORTS to list ports, 12000-12003,12007", brief(reserved), _AS_SET)
        ports = expand_hosts(f"[{reserved}]")  # the same ports on every node
        if max(local for _, local in places) < len(ports):
            return [int(ports[local]) for _, local in places]
    job = _number(environ, "SLURM_JOB_ID", 0, _MAX_NUMBER)
    step = _number(environ, "SLURM_STEP_ID", 0, _MAX_NUMBER)
    first = (job + _JOBS_PER_STEP * step) * _PORTS_PER_JOB
    # By rank rather than local number: Slurm's nodes may share a machine, as they do in tests.
    return [_FIRST_PORT + (first + rank) % _PORTS for rank in range(len(places))]


def _text(environ: Mapping[str, str], name: str) -> str:
    if name in environ:
        return environ[name]
    raise cluster_error(f"{name}, which srun sets in every task of a step", "no such variable", _AS_SET)


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = _text(environ, name)
    if re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most:
        return int(text)
    raise cluster_error(f"{name} to be an integer from {least} to {most}", brief(text), _AS_SET)


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expands a host list as `scontrol show hostnames` does: in Slurm's order, duplicates included.

    Numbers are padded to the width of the range's start: n[08-10] is n08, n09 and n10. A suffix after the brackets
    (node[1-2]-ib), which Slurm 22.05 refuses, is accepted too.

    Raises:
        ClusterError: If `text` is not a host list, or names more than 65,536 hosts.

    Example:
        >>> expand_hosts("n[9-10],r[1-2]s[1-2]")
        ('n9', 'n10', 'r1s1', 'r1s2', 'r2s1', 'r2s2')
    """
    if not _HOST_LIST.fullmatch(text):
        raise _list_error(text, "unbalanced brackets, a misplaced comma or a space")
    hosts: list[str] = []
    for entry in re.findall(_ENTRY, text):
        literals, groups = _GROUP.split(entry)[::2], [_ranges(group, text) for group in _GROUP.findall(entry)]
        count = math.prod(sum(len(numbers) for numbers, _ in group) for group in groups)
        if len(hosts) + count > _MAX_HOSTS:
            raise _list_error(text, f"it names more than {_MAX_HOSTS} hosts")
        if sum(map(len, literals)) + sum(max(width for _, width in group) for group in groups) > _MAX_NAME_CHARACTERS:
            raise _list_error(text, f"one of its names is longer than {_MAX_NAME_CHARACTERS} characters")
        hosts += _entry_names(literals, groups)
    return tuple(hosts)


def _ranges(group: str, text: str) -> list[tuple[range, int]]:
    """The ranges of a bracketed group, each with the width its numbers are padded to."""
    found = []
    for part in group.split(","):
        match = _RANGE.fullmatch(part)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if match is None or not numbers:
            raise _list_error(text, f"{brief(part)} is neither a number nor a range")
        found.append((numbers, len(match[1])))
    return found


def _entry_names(literals: list[str], groups: list[list[tuple[range, int]]]) -> list[str]:
    """The names of one entry. As in Slurm, the last group varies fastest, then the first, the second, and so on."""
    if not groups:
        return literals
    *rest, last = [[f"{number:0{width}}" for numbers, width in group for number in numbers] for group in groups]
    names = []
    for values in itertools.product(*reversed(rest), last):
        numbers = [*reversed(values[:-1]), values[-1], ""]
        names.append("".join(itertools.chain.from_iterable(zip(literals, numbers, strict=True))))
    return names


def _list_error(text: str, fault: str) -> ClusterError:
    return cluster_error(
        "a host list as Slurm writes it, n[1-3,07],login",
        f"{brief(text)}; {fault}",
        "pass Slurm's variables on as srun set them; scontrol show hostnames shows what a list expands to",
    )
