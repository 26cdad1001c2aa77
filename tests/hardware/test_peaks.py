"""Listed peaks: exact figures, and no figure for a device that is only called alike."""

import pytest

from tfopt.hardware.peaks import _BOARDS, peak_tflops

DTYPES = ("float32", "tensorfloat32", "float16", "bfloat16", "float8")


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA B200", (None, 1100.0, 2250.0, 2250.0, 4500.0)),
        ("NVIDIA H200", (67.0, 494.5, 989.5, 989.5, 1979.0)),
        ("NVIDIA H100 80GB HBM3", (67.0, 494.5, 989.5, 989.5, 1979.0)),
        ("NVIDIA H100 PCIe", (51.0, 378.0, 756.5, 756.5, 1513.0)),
        ("NVIDIA L40S", (91.6, 183.0, 362.05, 362.05, 733.0)),
        ("NVIDIA L4", (30.3, 60.0, 121.0, 121.0, 242.5)),
        ("NVIDIA A100-SXM4-40GB", (19.5, 156.0, 312.0, 312.0, None)),
        ("NVIDIA A40", (37.4, 74.8, 149.7, 149.7, None)),
        ("Tesla V100-SXM2-16GB", (15.7, None, 125.0, None, None)),
        ("Tesla V100-PCIE-16GB", (14.0, None, 112.0, None, None)),
        ("Tesla T4", (8.1, None, 65.0, None, None)),
        ("NVIDIA GeForce RTX 5090", (104.8, None, 209.5, 209.5, None)),
        ("NVIDIA GeForce RTX 4090", (82.6, 82.6, 165.2, 165.2, 330.3)),
    ],
)
def test_listed_peaks_are_exact(name, peaks):
    assert tuple(peak_tflops(name, dtype) for dtype in DTYPES) == peaks


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10G",
        "GRID A100-10C",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA",
        "",
    ],
)
def test_a_device_that_is_only_called_alike_has_none(name):
    assert [peak_tflops(name, dtype) for dtype in DTYPES] == [None] * 5


@pytest.mark.parametrize("dtype", ["float64", "int8", "", "_asdict", "count"])
def test_a_data_type_that_is_not_listed_has_none(dtype):
    assert peak_tflops("NVIDIA H200", dtype) is None


def test_a_narrower_type_is_never_slower():
    for board in _BOARDS.values():
        known = [peak for peak in board if peak is not None]
        assert known == sorted(known)
