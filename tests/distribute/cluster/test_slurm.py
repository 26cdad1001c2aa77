"""from_slurm(): the variables that Slurm 22.05 set in the tasks of real steps, and malformed ones."""

import json
import random

import fake_nvml
import pynvml
import pytest
from fake_nvml import FakeGpu
from three_parts import check_three_parts

from tfopt import hardware
from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.cluster.resolving import resolve
from tfopt.distribute.cluster.slurm import from_slurm
from tfopt.distribute.placement import visible_devices
from tfopt.errors import ClusterError

nvml = fake_nvml.fake_nvml

BATCH_SHELL = {
    "SLURMD_NODENAME": "n9",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "21",
    "SLURM_JOB_NODELIST": "n[9-10]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def task(rank, node, local, on_node, **changed):
    """The variables of a task in a step of five on n9 and n10, with some changed; None removes one."""
    environ = {
        "SLURMD_NODENAME": ["n9", "n10"][node],
        "SLURM_GTIDS": on_node,
        "SLURM_JOB_ID": "31",
        "SLURM_JOB_NODELIST": "n[9-10]",
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[9-10]",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_RESV_PORTS": "21016-21019",
        "SLURM_STEP_TASKS_PER_NODE": "3,2",
    }
    return {name: value for name, value in (environ | changed).items() if value is not None}


def block(**changed):
    """Task 3, the first of node n10."""
    return task(3, 1, 0, "3,4", **changed)


def cluster(environ):
    found = from_slurm(environ)
    assert isinstance(found, Cluster), found
    return found


@pytest.mark.parametrize(
    ("environ", "workers"),
    [
        (block(), "n9:21016 n9:21017 n9:21018 n10:21016 n10:21017"),
        (block(SLURM_DISTRIBUTION="block:cyclic,pack"), "n9:21016 n9:21017 n9:21018 n10:21016 n10:21017"),
        (
            task(3, 1, 1, "1,3", SLURM_DISTRIBUTION="cyclic"),
            "n9:21016 n10:21016 n9:21017 n10:21017 n9:21018",
        ),
        (
            task(3, 1, 1, "2,3", SLURM_DISTRIBUTION="plane", SLURM_DIST_PLANESIZE="2"),
            "n9:21016 n9:21017 n10:21016 n10:21017 n9:21018",
        ),
        (block(SLURM_STEP_RESV_PORTS="21005,21007-21008"), "n9:21005 n9:21007 n9:21008 n10:21005 n10:21007"),
    ],
)
def test_each_task_is_placed_where_slurm_runs_it(environ, workers):
    assert cluster(environ) == Cluster("Slurm", tuple(workers.split()), 3)


def test_tasks_on_many_nodes():
    nodes = {"SLURM_STEP_NODELIST": "n[8-10],gpu-a", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURMD_NODENAME": "n10"}
    changed = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_NODEID": "2", "SLURM_GTIDS": "4,5", "SLURM_LOCALID": "1"}
    found = cluster(task(5, 1, 1, "", **nodes, **changed))
    assert [address.host for address in found.addresses()] == ["n8", "n8", "n9", "n9", "n10", "n10", "gpu-a"]
    assert (found.index, found.local_rank, found.local_workers) == (5, 1, 2)


class TestPortsOfItsOwn:
    """If Slurm reserved none, or too few."""

    def ports(self, job, step=0, **changed):
        environ = block(SLURM_STEP_RESV_PORTS=None, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))
        return [address.port for address in cluster(environ | changed).addresses()]

    @pytest.mark.parametrize("reserved", [None, "", "21016", "21016-21017"])
    def test_they_follow_from_job_and_step(self, reserved):
        changed = {} if reserved is None else {"SLURM_STEP_RESV_PORTS": reserved}
        assert self.ports(31, 2, **changed) == [20000 + (31 + 331 * 2) * 16 + rank for rank in range(5)]

    def test_jobs_and_steps_at_one_time_do_not_share_any(self):
        places = [(job, 0) for job in range(4000, 4300)] + [(4000, step) for step in (1, 2)]
        ports = [port for place in places for port in self.ports(*place)]
        assert len(set(ports)) == len(ports)

    @pytest.mark.parametrize("job", [1, 797, 798, 10**6, 2**32 - 1])
    def test_they_stay_below_the_ephemeral_ones(self, job):
        assert all(20000 <= port < 32768 for port in self.ports(job, 2**32 - 6))

    def test_the_largest_step_has_ports_for_all(self):
        changed = {"SLURM_STEP_NUM_TASKS": "4096", "SLURM_STEP_TASKS_PER_NODE": "2048(x2)"}
        changed |= {"SLURM_PROCID": "2048", "SLURM_GTIDS": ",".join(map(str, range(2048, 4096)))}
        assert len(set(self.ports(797, **changed))) == 4096


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "Slurm: not in a job"),
        ({"SLURM_CONF": "/etc/slurm.conf"}, "Slurm: not in a job"),
        (BATCH_SHELL, "Slurm: in a job, but not in a step: srun did not start this process"),
        (BATCH_SHELL | {"SLURM_STEP_NUM_TASKS": "1"}, "Slurm: a step of one task"),
    ],
)
def test_one_process(environ, why):
    assert from_slurm(environ) == why
    assert resolve(environ).source == "one process"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (block(SLURM_STEP_NUM_TASKS=None), "SLURM_STEP_ID='0'"),
        (block(SLURM_STEP_NUM_TASKS=None, SLURM_STEP_ID=None), "SLURM_PROCID='3'"),
        (BATCH_SHELL | {"SLURM_STEPID": "0"}, "SLURM_STEPID='0'"),
    ],
)
def test_a_task_of_a_step_never_trains_alone(environ, found):
    with pytest.raises(ClusterError, match=f"Expected SLURM_STEP_NUM_TASKS, .* Found: {found} without it"):
        resolve(environ)


def test_tf_config_comes_first():
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    assert resolve(block(TF_CONFIG=json.dumps(config))).source == "TF_CONFIG"
    assert resolve(block()).source == "Slurm"


@pytest.mark.parametrize(
    ("changed", "guilty"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "two"},
            "Expected SLURM_STEP_NUM_TASKS to be an integer from 1 to 4096. Found: 'two'",
        ),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "to place the 6 tasks of SLURM_STEP_NUM_TASKS on the 2 nodes"),
        ({"SLURM_STEP_NODELIST": None}, "Expected SLURM_STEP_NODELIST, .* Found: no such variable"),
        ({"SLURM_STEP_NODELIST": "n[9-11]"}, "on the 3 nodes of SLURM_STEP_NODELIST. Found: '3,2'"),
        ({"SLURM_STEP_NODELIST": "n[10,9]"}, "Found: SLURMD_NODENAME='n10' and not 'n9'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,0"}, r"in the form 2\(x3\),1\. Found: '5,0'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "9(x999999999)"}, r"Found: '9\(x999999999\)'"),
        ({"SLURM_PROCID": None}, "Expected SLURM_PROCID, .* Found: no such variable"),
        ({"SLURM_PROCID": "5"}, "Expected SLURM_PROCID to be an integer from 0 to 4. Found: '5'"),
        ({"SLURM_PROCID": "4"}, "task 4 of the step .* Found: SLURM_LOCALID='0' and not '1'"),
        ({"SLURM_GTIDS": "3"}, "Found: SLURM_GTIDS='3' and not '3,4'"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "SLURM_GTIDS='3,4' and not '1,3'. What to do: .*--distribution=block"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "to be block, cyclic or plane. Found: 'arbitrary', .*TF_CONFIG in each"),
        ({"SLURM_DISTRIBUTION": "plane"}, "Expected SLURM_DIST_PLANESIZE, "),
        ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "0"}, "Expected SLURM_DIST_PLANESIZE to be .* '0'"),
        ({"SLURM_STEP_RESV_PORTS": "1-5]a[1"}, r"Expected SLURM_STEP_RESV_PORTS to list ports.* Found: '1-5\]a\[1'"),
        ({"SLURM_STEP_RESV_PORTS": None, "SLURM_JOB_ID": "31_4"}, "Expected SLURM_JOB_ID to be .* Found: '31_4'"),
        ({"SLURM_STEP_RESV_PORTS": None, "SLURM_STEP_ID": None}, "Expected SLURM_STEP_ID, "),
        ({"SLURM_HET_SIZE": "2"}, "Expected a step within one component of a heterogeneous job"),
    ],
)
def test_the_wrong_variable_is_named(changed, guilty):
    with pytest.raises(ClusterError, match=guilty) as caught:
        from_slurm(block(**changed))
    check_three_parts(caught.value)


def test_a_step_within_one_component_of_a_heterogeneous_job():
    components = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[9-10]"}
    assert cluster(block(SLURM_HET_SIZE="2", **components)).index == 3
    with pytest.raises(ClusterError, match="one over several components"):
        from_slurm(block(SLURM_HET_SIZE="2", **components, SLURM_JOB_NODELIST="n[1,9-10]"))


ODD = [
    "",
    " ",
    "-1",
    "0",
    "1",
    "2",
    "5",
    "99999999999",
    "n[9-10]",
    "n9",
    "3,2",
    "2(x2)",
    "9(x9)",
    "(null)",
    "é",
    "\udc80",
]
ODD += ["\x00", "block", "cyclic", "plane", "a" * 5000, "1" * 5000, "[" * 500]


def mutated(draw):
    environ = draw.choice([block(), task(3, 1, 1, "1,3", SLURM_DISTRIBUTION="cyclic")])
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*environ, "SLURM_DIST_PLANESIZE", "SLURM_HET_SIZE"])
        if draw.random() < 0.3:
            environ.pop(name, None)
        else:
            environ[name] = draw.choice(ODD)
    return environ


def test_five_thousand_mutated_ones_give_a_cluster_a_line_or_a_cluster_error():
    draw = random.Random(8)
    clusters = errors = 0
    for _ in range(5000):
        environ = mutated(draw)
        try:
            found = from_slurm(environ)
        except ClusterError as error:
            errors += 1
            check_three_parts(error)
            continue
        clusters += isinstance(found, Cluster)
    # Both outcomes occurred often.
    assert min(clusters, errors) > 100


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (4, ["0,1", "2,3"], ["0,1", "2,3"]),  # --gpus-per-task=2
        (4, ["0,1", "0,1"], ["0,1", "0,1"]),  # and a control group for each task
        (4, ["0,1,2,3"] * 2, ["0,1", "2,3"]),
        (3, ["0,1,2"] * 2, ["0", "1"]),
        (2, ["GPU-b,GPU-a"] * 2, ["GPU-b", "GPU-a"]),
    ],
)
def test_a_tasks_own_gpus_are_left_alone_and_what_all_see_is_divided(gpus, visible, expected):
    """CUDA_VISIBLE_DEVICES and SLURM_GPUS_ON_NODE as Slurm 22.05 sets them for two tasks on a node."""
    pairs = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n9"}
    for local, value in enumerate(visible):
        environ = task(local, 0, local, "0,1", **pairs, CUDA_VISIBLE_DEVICES=value, SLURM_GPUS_ON_NODE=str(gpus))
        assert visible_devices(environ, cluster(environ)).value == expected[local]


def test_numbers_of_gpus_are_those_within_the_control_group(nvml):
    # NVML counts other jobs' GPUs and denies access to them.
    nvml.gpus += [FakeGpu(f"GPU-{bus}", bus=bus) for bus in range(4)]
    for gpu in (nvml.gpus[0], nvml.gpus[2]):
        nvml.fail("nvmlDeviceGetUUID", pynvml.NVML_ERROR_NO_PERMISSION, gpu=gpu)
    assert [gpu.uuid for gpu in hardware.gpus(environ={"CUDA_VISIBLE_DEVICES": "0,1"})] == ["GPU-1", "GPU-3"]
    assert [gpu.uuid for gpu in hardware.gpus(environ={"CUDA_VISIBLE_DEVICES": "GPU-3"})] == ["GPU-3"]
