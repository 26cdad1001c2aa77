from .gpus import MemoryUsage as MemoryUsage
from .gpus import reset_peak as reset_peak
from .gpus import set_growth as set_growth
from .gpus import set_limit as set_limit
from .gpus import usage as usage
from .releasing import release as release
