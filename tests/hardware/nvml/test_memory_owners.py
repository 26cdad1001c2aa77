"""Whose memory it is: this process's, others', or not to be told."""

import os

import pytest
from fake_nvml import OTHER_PROCESS

from tfopt.hardware.nvml import driver, gpu_reading

MIB = 2**20
OWN = os.getpid()


@pytest.fixture(params=[True, False], ids=["machine", "container"])
def machine(request, monkeypatch):
    """Whether process numbers are the driver's own."""
    first = "pid:[4026531836]" if request.param else "pid:[4026532756]"
    monkeypatch.setattr(os, "readlink", lambda path: {"/proc/self/ns/pid": first}[path])
    return bool(request.param)


def shares(gpu):
    reading = driver.door().read(gpu.uuid)
    return reading.gpu_memory_process_mib, reading.gpu_memory_others_mib


@pytest.mark.usefixtures("machine")
def test_this_process_and_two_others(gpu):
    gpu.processes = [(OTHER_PROCESS, 100 * MIB), (OWN, 900 * MIB), (OTHER_PROCESS + 1, 50 * MIB)]
    assert shares(gpu) == (900.0, 150.0)


@pytest.mark.usefixtures("machine")
def test_a_process_that_computes_and_draws_counts_once(gpu):
    gpu.processes = [(OTHER_PROCESS, 100 * MIB), (OWN, 900 * MIB)]
    gpu.graphics = [(OTHER_PROCESS, 100 * MIB), (OTHER_PROCESS + 1, 20 * MIB), (OWN, 900 * MIB)]
    assert shares(gpu) == (900.0, 120.0)


def test_alone_is_known_on_the_machine_only(gpu, machine):
    gpu.processes = [(OWN, 900 * MIB)]
    assert shares(gpu) == (900.0, 0.0 if machine else None)


def test_a_process_that_is_not_listed_may_be_listed_under_another_number(gpu, machine):
    gpu.processes = [(OTHER_PROCESS, 900 * MIB)]
    assert shares(gpu) == (None, 900.0 if machine else None)


def test_an_empty_list_says_nothing_in_a_container(gpu, machine):
    gpu.processes = []
    assert shares(gpu) == (None, 0.0 if machine else None)


@pytest.mark.usefixtures("machine")
def test_one_unknown_size_makes_the_sum_unknown(gpu):
    gpu.processes = [(OWN, 900 * MIB), (OTHER_PROCESS, 100 * MIB), (OTHER_PROCESS + 1, None)]
    assert shares(gpu) == (900.0, None)


@pytest.mark.usefixtures("machine")
def test_this_process_of_unknown_size_leaves_the_others(gpu):
    gpu.processes = [(OWN, None), (OTHER_PROCESS, 100 * MIB)]
    assert shares(gpu) == (None, 100.0)


@pytest.mark.parametrize("function", ["Compute", "Graphics"])
def test_half_of_the_list_gives_no_sum(function, gpu):
    gpu.unsupported = {f"nvmlDeviceGet{function}RunningProcesses_v3"}
    assert shares(gpu) == (900.0 if function == "Graphics" else None, None)


def test_the_number_is_that_of_the_process_that_asks(gpu, monkeypatch):
    """As after a fork."""
    monkeypatch.setattr(os, "getpid", lambda: OTHER_PROCESS)
    assert shares(gpu) == (100.0, 900.0)


def test_where_there_is_no_proc_the_numbers_may_be_others(monkeypatch):
    def fail(path):
        raise OSError(path)

    monkeypatch.setattr(os, "readlink", fail)
    assert not gpu_reading._in_first_namespace()
