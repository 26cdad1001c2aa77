"""What the GPUs and the host are and do. The only door to NVML and psutil.

`gpus()` and `host()` say what this process may use; `GpuSampler` reads what it does while something runs. On a machine
without a GPU they answer too: no GPUs, and samples of the host alone.
"""

from tfopt.hardware.gpus import Gpu, gpus
from tfopt.hardware.host import Host, host
from tfopt.hardware.sample import GpuSample
from tfopt.hardware.sampler import GpuSampler

__all__ = ["Gpu", "GpuSample", "GpuSampler", "Host", "gpus", "host"]
