from .accumulating import accumulate as accumulate
from .searching import BatchSearch as BatchSearch
from .searching import find as find
from .trials import Trial as Trial
