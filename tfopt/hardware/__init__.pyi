from .host_limits import Host as Host
from .host_limits import host as host
from .inventory import Gpu as Gpu
from .inventory import gpus as gpus
from .sampler import GpuSample as GpuSample
from .sampler import GpuSampler as GpuSampler
