"""Peak throughput of each board, as NVIDIA lists it."""

from typing import NamedTuple


class _Peaks(NamedTuple):
    """10¹² operations per second, dense. None: the board has no fast path, or NVIDIA lists no figure."""

    float32: float | None  # CUDA cores
    tensorfloat32: float | None = None
    float16: float | None = None
    bfloat16: float | None = None
    float8: float | None = None


# From NVIDIA's data sheet of that board unless noted; half the sheet's figure where it counts sparsity. On GeForce
# boards products are summed in float32, as cuBLAS does; summing in float16 would be twice as fast.
_H100_SXM = _Peaks(67.0, 494.5, 989.5, 989.5, 1979.0)
_H100_NVL = _Peaks(60.0, 417.5, 835.5, 835.5, 1670.5)
_A100 = _Peaks(19.5, 156.0, 312.0, 312.0)
_V100_SXM2 = _Peaks(15.7, float16=125.0)
_V100_PCIE = _Peaks(14.0, float16=112.0)

# By the driver's name without "NVIDIA", "Tesla" and "GeForce". Names must match in full: "A10G", "RTX 4090 Laptop GPU",
# "V100-FHHL-16GB" and "H200 MIG 1g.18gb" are slower than the board they start with.
_BOARDS = {
    # Blackwell data sheet, HGX B200 and GB200 NVL72. Its editions disagree on float32: 75 and 80, 80 and 90.
    "B200": _Peaks(None, 1100.0, 2250.0, 2250.0, 4500.0),
    "GB200": _Peaks(None, 1250.0, 2500.0, 2500.0, 5000.0),
    "H200": _H100_SXM,
    "H200 NVL": _H100_NVL,
    "H100 80GB HBM3": _H100_SXM,
    "H100 NVL": _H100_NVL,
    "H100 PCIe": _Peaks(51.0, 378.0, 756.5, 756.5, 1513.0),
    "L40S": _Peaks(91.6, 183.0, 362.05, 362.05, 733.0),
    "L40": _Peaks(90.5, 90.5, 181.05, 181.05, 362.0),
    "L4": _Peaks(30.3, 60.0, 121.0, 121.0, 242.5),
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "A40": _Peaks(37.4, 74.8, 149.7, 149.7),
    "A30": _Peaks(10.3, 82.0, 165.0, 165.0),
    "A10": _Peaks(31.2, 62.5, 125.0, 125.0),
    "V100-SXM2-16GB": _V100_SXM2,
    "V100-SXM2-32GB": _V100_SXM2,
    "V100-PCIE-16GB": _V100_PCIE,
    "V100-PCIE-32GB": _V100_PCIE,
    "T4": _Peaks(8.1, float16=65.0),
    # Architecture white papers: RTX Blackwell; Ada v2.1, appendix A; Ampere GA102 v2.0, appendix A.
    "RTX 5090": _Peaks(104.8, float16=209.5, bfloat16=209.5),
    "RTX 4090": _Peaks(82.6, 82.6, 165.2, 165.2, 330.3),
    "RTX 3090": _Peaks(35.6, float16=71.0, bfloat16=71.0),
}

_BRANDS = ("NVIDIA", "Tesla", "GeForce")


def peak_tflops(name: str, dtype: str) -> float | None:
    """Returns NVIDIA's listed peak of a board in a data type, in 10¹² floating-point operations per second.

    Use it as the denominator of utilisation (MFU) if nothing was measured. It assumes the boost clock and no structured
    sparsity; no program reaches it.

    Args:
        name: The product, as in `tfopt.hardware.gpus()`: "NVIDIA H200".
        dtype: "float32" (without tensor cores), "tensorfloat32", "float16", "bfloat16" or "float8".

    Returns:
        The peak; None if the board or data type is not listed, and for a MIG instance, which is only part of a board.

    Example:
        >>> peak_tflops("NVIDIA H200", "bfloat16")
        989.5
    """
    words = name.split()
    while words and words[0] in _BRANDS:
        del words[0]
    board = _BOARDS.get(" ".join(words))
    return None if board is None else board._asdict().get(dtype)
