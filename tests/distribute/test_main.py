"""`python -m tfopt.distribute`: what it prints, its exit codes, and that it loads no TensorFlow."""

import json
import os
import subprocess
import sys

import pytest

from tfopt.distribute.__main__ import main
from tfopt.distribute.cluster.membership import Cluster

CLUSTER = Cluster("TF_CONFIG", ("here:1", "here:2"), 1)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER.tf_config()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")


def test_it_explains_the_cluster(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "worker 1 (here:2) of 2 workers, from TF_CONFIG",
        "  arguments: none",
        "  TF_CONFIG: taken",
        "  workers: here:1, here:2",
        "  this host: local rank 1 of 2",
        "  CUDA_VISIBLE_DEVICES=5: 1 of 2 GPUs, local rank 1 of 2",
        "  NCCL_DEBUG=INFO",
    ]


def test_json(capsys):
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["value"] == "5"
    assert found["nccl"] == {"NCCL_DEBUG": "INFO"}
    assert found["workers"] == ["here:1", "here:2"]
    assert found["notes"] == ["arguments: none", "TF_CONFIG: taken"]


def test_a_wrong_environment(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main([]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Expected TF_CONFIG to hold JSON")
    assert err.count("\n") == 1


def test_as_a_process_without_tensorflow():
    script = (
        "import runpy, sys; sys.argv = ['tfopt.distribute']\n"
        "try: runpy.run_module('tfopt.distribute', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'pynvml'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("worker 1 (here:2)")


def test_only_variables_of_nccl_in_order(monkeypatch, capsys):
    def nccl():
        assert main(["--json"]) == 0
        return list(json.loads(capsys.readouterr().out)["nccl"].items())

    monkeypatch.delenv("NCCL_DEBUG")
    assert nccl() == []
    for name, value in {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_ALGO": "Ring", "MY_NCCL_X": "1"}.items():
        monkeypatch.setenv(name, value)
    assert nccl() == [("NCCL_ALGO", "Ring"), ("NCCL_SOCKET_IFNAME", "eth0")]
