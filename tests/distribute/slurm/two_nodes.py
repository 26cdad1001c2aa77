"""A real Slurm of two nodes, n9 and n10, on this one machine: its own munged, slurmctld and two slurmds, as root.

    with two_nodes(Path("/tmp/slurm")) as environ:
        subprocess.run(["srun", "-N2", "hostname"], env=environ)

It needs Debian's packages slurm-wlm and munge. The nodes' names stand in /etc/hosts meanwhile.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
DEADLINE = 60  # seconds for all daemons to come up, and for each to end
HOSTS = Path("/etc/hosts")

# A requeued job waits for cred_expire, by default 120 s. Reserved ports are the same on all nodes and would collide on
# one machine, so steps reserve only ports that nothing listens on.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiParams=ports=12000-12099
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
RequeueExit=75
NodeName=n[9-10] NodeHostname={machine} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
"""


def why_not():
    """Why Slurm cannot be started here; empty if it can."""
    missing = [name for name in NEEDED if not shutil.which(name, path=_PATH)]
    if missing:
        return f"needs {missing[0]} (apt-get install slurm-wlm munge)"
    if os.geteuid() or not os.access(HOSTS, os.W_OK):
        return "needs root, to start slurmd and to name the nodes in /etc/hosts"
    return ""


@contextlib.contextmanager
def two_nodes(folder):
    """Starts Slurm in a folder with a short path and yields the environment in which its commands find it."""
    environ = os.environ | {"PATH": _PATH, "SLURM_CONF": f"{folder}/slurm.conf", "SLURM_RESV_PORTS": "0"}
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    values = {"folder": folder, "machine": socket.gethostname(), "ports": _free_ports(), "cpus": os.cpu_count()}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
    parts = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")}
    munged = ["munged", "--force", f"--socket={folder}/munge.socket", *parts.values()]
    with _named(f"127.0.0.1 n9 n10 # {folder}\n"):
        try:
            for command in (munged, ["slurmctld"], ["slurmd", "-N", "n9"], ["slurmd", "-N", "n10"]):
                subprocess.run(command, env=environ, check=True, timeout=DEADLINE)
            _until(lambda: _idle(environ) == 2, f"two idle nodes; see {folder}")
            yield environ
        finally:
            _stop(folder, environ)


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports():
    """Three consecutive ports that nobody listens on."""
    for first in range(16000, 19000, 3):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            return [
                stack.enter_context(socket.create_server(("", port))).getsockname()[1]
                for port in range(first, first + 3)
            ]
    raise OSError("no three free ports")


@contextlib.contextmanager
def _named(line):
    with HOSTS.open("a") as file:
        file.write(line)
    try:
        yield
    finally:
        HOSTS.write_text(HOSTS.read_text().replace(line, ""))


def _idle(environ):
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE)
    return int(answer.stdout.strip() or 0)


def _stop(folder, environ):
    """Ends the jobs, then the daemons."""
    with contextlib.suppress(subprocess.SubprocessError):
        subprocess.run(["scancel", "--user=root"], env=environ, timeout=DEADLINE)
        _until(lambda: _idle(environ) == 2, "the jobs to end")
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in pids:
        _until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"process {pid}, of which {folder} tells, to end")


def _until(reached, what):
    due = time.monotonic() + DEADLINE
    while not reached():
        if time.monotonic() > due:
            raise TimeoutError(f"expected {what} within {DEADLINE} s")
        time.sleep(0.1)
