from .cluster.membership import Cluster as Cluster
from .cluster.resolving import own_path as own_path
from .cluster.resolving import resolve as resolve
from .compression import compress_gradients as compress_gradients
from .strategies import explain as explain
from .strategies import strategy as strategy
