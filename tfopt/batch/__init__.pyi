from .accumulating import accumulate as accumulate
from .searching import BatchSearch as BatchSearch
from .searching import Trial as Trial
from .searching import find as find
