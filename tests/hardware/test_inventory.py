"""gpus(): CUDA_VISIBLE_DEVICES as CUDA reads it, MIG, and machines without a GPU; MIG instances; nearby CPUs."""

import json
import os

import pynvml
import pytest
from fake_nvml import FakeGpu, mig_instance

from tfopt.hardware import Gpu, gpus
from tfopt.hardware.inventory import PcieLink, cpu_affinity, mig_instances, pcie_link

A, B, C = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333"


@pytest.fixture
def three(fake_nvml):
    """Three GPUs of one kind; NVML lists them in another order than the bus."""
    fake_nvml.gpus += [FakeGpu(uuid=C, bus=3), FakeGpu(uuid=A, bus=1), FakeGpu(uuid=B, bus=2)]
    return fake_nvml.gpus


@pytest.fixture
def unlike(three):
    three[0].name = "NVIDIA T1000"


@pytest.fixture
def mig(fake_nvml):
    """A GPU with two MIG instances, one whole GPU, one GPU with MIG mode on and no instance."""
    fake_nvml.gpus += [
        FakeGpu(uuid=A, bus=1, instances=[None, mig_instance("MIG-a1"), mig_instance("MIG-a2")]),
        FakeGpu(uuid=B, bus=2),
        FakeGpu(uuid=C, bus=3, instances=[]),
    ]


def seen(visible, **variables):
    """The UUIDs that a process with this CUDA_VISIBLE_DEVICES may use."""
    environ = variables if visible is None else {"CUDA_VISIBLE_DEVICES": visible, **variables}
    found = gpus(environ=environ)
    assert [gpu.index for gpu in found] == list(range(len(found)))
    return [gpu.uuid for gpu in found]


def test_a_gpu_has_all_its_fields(gpu):
    (found,) = gpus()
    assert found == Gpu(0, gpu.uuid, "NVIDIA H200", 143_771, (9, 0), False, "570.86.15")
    assert str(found) == "GPU:0 NVIDIA H200, 143771 MiB, compute capability 9.0, driver 570.86.15"
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert found.to_dict()["compute_capability"] == [9, 0]


def test_what_the_device_does_not_say_is_none(gpu, fake_nvml):
    gpu.unsupported = {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode"}
    gpu.unsupported |= {"nvmlDeviceGetPciInfo"}
    fake_nvml.fail("nvmlSystemGetDriverVersion", pynvml.NVML_ERROR_NOT_SUPPORTED)
    (found,) = gpus()
    assert found == Gpu(0, gpu.uuid, "NVIDIA H200", None, None, False, None)
    assert str(found) == "GPU:0 NVIDIA H200"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [A, B, C]),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("1,", [B]),
        (B, [B]),
        (f"{C},0", [C, A]),
        ("GPU-a", [A]),
        ("GPU-bbbb3", [C]),
        ("", []),
        ("  ", []),
        ("-1", []),
        ("-1,0", []),
        ("NoDevFiles", []),
        ("2,-1,0", [C]),
        ("1,NoDevFiles", [B]),
    ],
)
@pytest.mark.usefixtures("three")
def test_the_list_is_read_as_cuda_reads_it(visible, expected, caplog):
    assert seen(visible) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("visible", "expected", "named"),
    [
        ("1,3,0", [B], "'3'"),
        ("0,x,1", [A], "'x'"),
        ("0,,1", [A], "''"),
        (",1", [], "''"),
        ("GPU-zzzz,0", [], "'GPU-zzzz'"),
        ("GPU-bbbb,0", [], "'GPU-bbbb'"),
        ("MIG-1234", [], "'MIG-1234'"),
        ("0x1", [], "'0x1'"),
        ("²", [], "'²'"),
        ("9" * 5000, [], "'999"),
    ],
)
@pytest.mark.usefixtures("three")
def test_an_unknown_entry_ends_the_list_with_one_warning_that_names_it(visible, expected, named, caplog):
    assert seen(visible) == seen(visible) == expected
    assert len(caplog.records) == 1
    assert f"Found: {named}" in caplog.text


@pytest.mark.parametrize("visible", ["0,0", "0,1,0", f"0,{A}", f"{B},GPU-bbbb2"])
@pytest.mark.usefixtures("three")
def test_a_gpu_named_twice_hides_all_with_a_warning(visible, caplog):
    assert seen(visible) == []
    assert len(caplog.records) == 1
    assert "names one twice" in caplog.text


@pytest.mark.usefixtures("three")
def test_a_repetition_after_the_end_of_the_list_is_not_read():
    assert seen("0,1,-1,0") == [A, B]


@pytest.mark.usefixtures("unlike")
def test_indices_of_unlike_gpus_are_unknown_by_default(caplog):
    assert seen("0") == seen("0") == seen("0", CUDA_DEVICE_ORDER="FASTEST_FIRST") == []
    assert len(caplog.records) == 1
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caplog.text
    assert "UUID" in caplog.text


@pytest.mark.usefixtures("unlike")
def test_unlike_gpus_are_known_by_bus_id_by_uuid_or_all(caplog):
    assert seen("2,0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [C, A]
    assert seen(f"{C},{A}") == [C, A]
    assert seen(None) == [A, B, C]
    assert seen("-1") == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", ["MIG-a1"]), (A, ["MIG-a1"]), ("MIG-a2", ["MIG-a2"]), ("1", [B])],
)
@pytest.mark.usefixtures("mig")
def test_a_gpu_in_mig_mode_stands_for_its_first_instance(visible, expected, caplog):
    assert seen(visible) == expected
    assert not caplog.records


@pytest.mark.parametrize("visible", ["MIG-a2,MIG-a1", "1,MIG-a2", "MIG-a2,1"])
@pytest.mark.usefixtures("mig")
def test_a_process_uses_one_mig_instance_and_no_other_gpu(visible, caplog):
    assert seen(visible) == ["MIG-a2"]
    assert "one process per instance" in caplog.text


@pytest.mark.usefixtures("mig")
def test_a_mig_instance_has_its_own_name_and_memory():
    (found,) = gpus(environ={"CUDA_VISIBLE_DEVICES": "MIG-a2"})
    assert found == Gpu(0, "MIG-a2", "NVIDIA H200 MIG 1g.18gb", 16_384, (9, 0), True, "570.86.15")
    assert "MIG instance" in str(found)


@pytest.mark.usefixtures("mig")
def test_mig_mode_without_an_instance_is_no_gpu(caplog):
    assert seen("2") == []
    assert "nvidia-smi mig" in caplog.text


@pytest.mark.usefixtures("mig")
def test_an_instance_named_twice_hides_all():
    assert seen("0,MIG-a1") == []


def test_the_default_is_this_processs_environment(gpu, monkeypatch):
    assert len(gpus()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpus() == ()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver_is_normal(code, fake_nvml, caplog):
    fake_nvml.fail("nvmlInit", code)
    assert gpus() == ()
    assert not caplog.records


def test_a_missing_module_is_worth_a_warning(fake_nvml, caplog):
    fake_nvml.installed = False
    assert gpus() == gpus() == ()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pip install nvidia-ml-py" in caplog.text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_every_error_of_the_driver_is_an_empty_answer(function, error_codes, fake_nvml, caplog):
    for code in error_codes:
        fake_nvml.fail(function, code)
        assert gpus() == gpus() == (), code
        silent = code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        assert len(caplog.records) == (0 if silent and function != "nvmlDeviceGetHandleByIndex" else 1), code


def test_a_hang_ends_at_the_deadline_with_one_warning(gpu, fake_nvml, caplog):
    fake_nvml.hang("nvmlDeviceGetName")
    assert gpus(deadline_seconds=0.05) == gpus(deadline_seconds=0.05) == ()
    assert len(caplog.records) == 1
    assert "hangs" in caplog.text
    assert not fake_nvml.released.is_set()


def test_hidden_gpus_are_not_even_asked(fake_nvml):
    fake_nvml.hang("nvmlInit")
    assert seen("-1") == []
    assert fake_nvml.calls["nvmlInit"] == 0


def test_the_mig_instances_of_all_gpus(fake_nvml):
    fake_nvml.gpus += [
        FakeGpu("GPU-b", bus=2, instances=[mig_instance("MIG-b1")]),
        FakeGpu("GPU-a", bus=1, instances=[mig_instance("MIG-a1"), None, mig_instance("MIG-a2")]),
        FakeGpu("GPU-c", bus=3),
    ]
    assert mig_instances() == ("MIG-a1", "MIG-a2", "MIG-b1")
    assert len(gpus()) == 1


def test_no_driver_means_no_mig_instance(fake_nvml, caplog):
    fake_nvml.fail("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert mig_instances() == ()
    assert not caplog.text


def test_a_driver_in_trouble_shows_no_mig_instance(fake_nvml, caplog):
    fake_nvml.fail("nvmlInit", pynvml.NVML_ERROR_UNKNOWN)
    assert mig_instances() == ()
    assert "What to do" in caplog.text


def test_the_cpus_near_a_gpu(gpu):
    gpu.cpus = {0, 5, 63, 64, 130, 8191}
    assert cpu_affinity(gpus()[0]) == {0, 5, 63, 64, 130, 8191}


def test_a_mig_instance_has_those_of_its_gpu(fake_nvml):
    instance = mig_instance("MIG-1")
    fake_nvml.gpus += [FakeGpu("GPU-0", cpus={0}), FakeGpu("GPU-1", bus=2, cpus={3, 4}, instances=[instance])]
    (found,) = gpus()
    assert found.uuid == "MIG-1"
    assert cpu_affinity(found) == {3, 4}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a_driver_that_does_not_say(gpu, code):
    gpu.errors["nvmlDeviceGetCpuAffinity"] = code
    assert cpu_affinity(gpus()[0]) is None


def test_a_gpu_that_is_gone_warns(gpu, fake_nvml, caplog):
    (found,) = gpus()
    fake_nvml.gpus.clear()
    assert cpu_affinity(found) is None
    assert found.uuid in caplog.text


def test_the_pcie_link(gpu):
    gpu.pcie = 4, 8, 5, 16
    assert pcie_link(gpus()[0]) == PcieLink(4, 8, best_generation=5, best_lanes=16)
    assert str(pcie_link(gpus()[0])) == "PCIe 4.0 ×8"
    gpu.errors["nvmlDeviceGetMaxPcieLinkWidth"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert pcie_link(gpus()[0]) is None
