from . import batch as batch
from . import callbacks as callbacks
from . import checkpoint as checkpoint
from . import compress as compress
from . import diagnosis as diagnosis
from . import distribute as distribute
from . import errors as errors
from . import fit as fit
from . import hardware as hardware
from . import kernels as kernels
from . import measure as measure
from . import memory as memory
from . import pipelines as pipelines
from . import precision as precision
from . import repairs as repairs
from . import xla as xla
from .diagnosis import diagnose as diagnose
from .diagnosis import tune as tune

__version__: str
