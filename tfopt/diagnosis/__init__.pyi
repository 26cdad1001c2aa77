from .findings import CauseCost as CauseCost
from .findings import Diagnosis as Diagnosis
from .findings import NotTested as NotTested
