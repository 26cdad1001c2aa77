"""Real steps of a real Slurm: what resolve() finds in them, and which signals reach Python."""

import json
import sys
from pathlib import Path

import pytest

import tfopt

pytestmark = pytest.mark.slow
TEMPLATE = Path(tfopt.__file__).parent / "distribute" / "templates" / "slurm.sh"

WHO = """
import json, os
from tfopt.distribute.cluster.resolving import resolve
print(json.dumps(resolve().to_dict() | {"rank": os.environ["SLURM_PROCID"], "node": os.environ["SLURMD_NODENAME"]}))
"""
REFUSED = """
from tfopt.distribute.cluster.resolving import resolve
from tfopt.errors import ClusterError
try:
    print(resolve())
except ClusterError as error:
    print(error)
"""
WATCHED = """
import signal, sys, time
from tfopt.distribute.cluster.resolving import resolve
from tfopt.distribute.watchdog.watch import Watch
told = []
def note(number, frame):
    told.append(number)
    print("saving after", signal.Signals(number).name, flush=True)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGUSR1, note)
if "--watch" in sys.argv:
    Watch.start(resolve())
print("training", flush=True)
while not told:
    time.sleep(0.1)
time.sleep(3)  # long enough for a watchdog ended by the signal to end this process
"""


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ("-N2 -n2", "n9 n10"),
        ("-N2 -n5", "n9 n9 n9 n10 n10"),
        ("-N2 -n5 -m cyclic", "n9 n10 n9 n10 n9"),
        ("-N2 -n5 -m plane=2", "n9 n9 n10 n10 n9"),
        ("-N2 -n3 --resv-ports=2", "n9 n9 n10"),
    ],
)
def test_each_task_finds_the_same_workers_and_itself(slurm, options, nodes):
    tasks = [json.loads(line) for line in slurm.python(WHO, *options.split())]
    workers = tasks[0]["workers"]
    assert [worker.split(":")[0] for worker in workers] == nodes.split()
    assert len(set(workers)) == len(workers)
    assert len(tasks) == len(workers)
    for task in tasks:
        assert (task["source"], task["workers"]) == ("Slurm", workers)
        assert (task["index"], task["address"].split(":")[0]) == (int(task["rank"]), task["node"])


def test_its_nodes_are_those_that_scontrol_names(slurm):
    step = "scontrol show hostnames $SLURM_STEP_NODELIST | xargs"
    assert slurm.srun("-N2", "-n2", "sh", "-c", step).splitlines() == ["n9 n10"] * 2


def test_reserved_ports_are_taken(slurm):
    workers = json.loads(slurm.python(WHO, "-N2", "-n2", "--resv-ports=1")[0])["workers"]
    ports = {int(worker.split(":")[1]) for worker in workers}
    assert len(ports) == 1  # the same on both nodes
    assert 12000 <= ports.pop() < 12100


def test_two_jobs_have_ports_of_their_own(slurm):
    first, second = (set(json.loads(slurm.python(WHO, "-N2", "-n2")[0])["workers"]) for _ in range(2))
    assert not first & second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-n1", "one process"),
        (
            "-w n10,n9,n9 -n3 -m arbitrary",
            "Expected SLURM_DISTRIBUTION to be block, cyclic or plane. Found: 'arbitrary'",
        ),
    ],
)
def test_what_is_no_cluster(slurm, options, said):
    for line in slurm.python(REFUSED, *options.split()):
        assert line.startswith(said)


def test_a_step_over_the_components_of_a_heterogeneous_job_is_refused(slurm):
    python = [sys.executable, "-c", REFUSED]
    told = slurm.srun("-w", "n10", "-n1", *python, ":", "-w", "n9", "-n2", "--overcommit", *python).splitlines()
    assert len(told) == 3
    assert all(line.startswith("Expected a step within one component of a heterogeneous job") for line in told)


def test_the_shell_of_sbatch_is_one_process(slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n'{sys.executable}' -m tfopt.distribute\n")
    job = slurm.submit("-N2", "-n2", script)
    assert slurm.ended(job)["JobState"] == "COMPLETED", slurm.output(job)
    assert slurm.output(job).startswith("one process\n")
    assert "\n  Slurm: in a job, but not in a step: srun did not start this process\n" in slurm.output(job)


def test_signals_before_the_time_limit_reach_python(slurm, tmp_path):
    program = [sys.executable, "-c", WATCHED]
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\nsrun "$@"\n')
    jobs = {
        "SIGTERM": slurm.submit("--time=1", "--signal=TERM@55", TEMPLATE, *program, "--watch"),
        "SIGUSR1": slurm.submit("--time=1", "--signal=USR1@55", "-N2", "-n2", script, *program, "--watch"),
    }
    for name, job in jobs.items():
        end = slurm.ended(job, seconds=120)
        assert (end["JobState"], end["ExitCode"]) == ("COMPLETED", "0:0"), slurm.output(job)
        assert slurm.output(job).count(f"saving after {name}") == 2
