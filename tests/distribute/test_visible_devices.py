"""visible_devices(): never more than the launcher left, divided by local rank. With a fake NVML."""

import json

import fake_nvml
import pytest
from fake_nvml import FakeGpu, mig_instance

from tfopt.distribute.cluster.membership import ONE_PROCESS, Cluster
from tfopt.distribute.placement import visible_devices
from tfopt.errors import ClusterError

nvml = fake_nvml.fake_nvml
pytestmark = pytest.mark.usefixtures("nvml")

ALONE = Cluster(ONE_PROCESS)


def on_a_host(workers):
    """The clusters of a host's workers, by local rank; each has a peer of lower rank elsewhere."""
    addresses = tuple(a for port in range(1, workers + 1) for a in (f"elsewhere:{port}", f"here:{port}"))
    return [Cluster("arguments", addresses, 2 * rank + 1) for rank in range(workers)]


def values(visible, workers):
    """Each worker's variable on a host where all start with this one."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [visible_devices(environ, cluster).value for cluster in on_a_host(workers)]


@pytest.mark.parametrize(
    ("visible", "workers", "expected"),
    [
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("3,1,2,0", 4, ["3", "1", "2", "0"]),
        ("7,6,5,4,3", 2, ["7,6", "5,4"]),
        ("GPU-b, GPU-a", 2, ["GPU-b", "GPU-a"]),
        ("0,1,-1,2", 2, ["0", "1"]),
        ("0,1,,2,3,4", 2, ["0", "1"]),
        ("0,NoDevFiles", 1, ["0,NoDevFiles"]),
        ("0,NoDevFiles,1,2", 2, ["0,NoDevFiles,1,2"] * 2),
        ("0, 1", 1, ["0, 1"]),
        ("0", 1, ["0"]),
    ],
)
def test_a_value_is_divided_in_blocks(visible, workers, expected):
    assert values(visible, workers) == expected


@pytest.mark.parametrize(("visible", "workers"), [("5", 2), ("0,1", 3), ("GPU-a", 8), ("MIG-a", 2), ("MIG-a,MIG-b", 3)])
def test_a_workers_own_gpus_are_left_alone(visible, workers):
    assert values(visible, workers) == [visible] * workers


def test_what_the_launcher_assigned_is_left_alone():
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "TFOPT_GPUS_ASSIGNED": "1"}
    assert {str(visible_devices(environ, cluster)) for cluster in on_a_host(2)} == {
        "CUDA_VISIBLE_DEVICES=0,1: this worker's own, says TFOPT_GPUS_ASSIGNED"
    }


@pytest.mark.parametrize("visible", ["", "NoDevFiles", "-1,0", "0,0"])
def test_no_gpu_stays_no_gpu(visible):
    assert values(visible, 2) == [visible, visible]


@pytest.mark.parametrize(
    ("visible", "workers", "expected"),
    [
        ("MIG-a,MIG-b", 2, ["MIG-a", "MIG-b"]),
        ("MIG-a,MIG-b,MIG-c,MIG-d", 2, ["MIG-a", "MIG-b"]),
        ("MIG-GPU-x/1/0,MIG-GPU-x/2/0", 2, ["MIG-GPU-x/1/0", "MIG-GPU-x/2/0"]),
        ("MIG-a,MIG-b", 1, ["MIG-a"]),
        ("MIG-a,MIG-b", 3, ["MIG-a,MIG-b"] * 3),
    ],
)
def test_a_process_takes_one_mig_instance(visible, workers, expected):
    assert values(visible, workers) == expected


def test_an_unset_variable_stays_unset_for_one_worker_on_its_host(nvml):
    nvml.gpus += [FakeGpu("GPU-a", bus=1), FakeGpu("GPU-b", bus=2)]
    assert values(None, 1) == [None]
    assert visible_devices({}, ALONE).value is None
    assert nvml.calls.total() == 0  # the driver is not even asked


def test_an_unset_variable_is_filled_for_several(nvml):
    nvml.gpus += [FakeGpu(f"GPU-{bus}", bus=bus) for bus in range(4)]
    assert values(None, 2) == ["0,1", "2,3"]
    assert values(None, 4) == ["0", "1", "2", "3"]


def test_no_gpu_leaves_it_unset():
    assert values(None, 2) == [None, None]


def test_one_gpu_is_not_shared_by_two_workers(nvml):
    nvml.gpus.append(FakeGpu())
    with pytest.raises(
        ClusterError, match=r"a GPU for each of the 2 workers on this host\. Found: 1 \(0\), and NCCL .* What to do: "
    ):
        values(None, 2)


def test_all_mig_instances_of_the_machine_are_divided(nvml, caplog):
    nvml.gpus += [
        FakeGpu("GPU-a", bus=1, instances=[mig_instance("MIG-a1"), mig_instance("MIG-a2")]),
        FakeGpu("GPU-b", bus=2, instances=[mig_instance("MIG-b1")]),
    ]
    assert values(None, 3) == ["MIG-a1", "MIG-a2", "MIG-b1"]
    assert not caplog.text


def test_the_reason_tells_what_is_left_unused():
    found = visible_devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}, on_a_host(2)[1])
    assert str(found) == "CUDA_VISIBLE_DEVICES=1: 1 of 3 GPUs, local rank 1 of 2, 1 left unused"
    assert json.loads(json.dumps(found.to_dict())) == {"value": "1", "reason": found.reason}
