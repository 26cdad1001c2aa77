"""The GPUs and the host: `gpus()` and `host()` list what this process may use, `GpuSampler` samples it during a run.

The only package that talks to NVML and psutil. Without a GPU, `gpus()` is empty and samples cover the host alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
