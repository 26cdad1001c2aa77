"""What the GPUs and the host are and do. The only package that talks to NVML and psutil.

`gpus()` and `host()` say what this process may use; `GpuSampler` reads what it does while something runs. On a machine
without a GPU they work too: no GPUs, and samples of the host alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
