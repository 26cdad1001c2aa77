from .costing import cost as cost
from .distilling import distil as distil
from .model_cost import LayerCost as LayerCost
from .model_cost import ModelCost as ModelCost
from .suggesting import CheaperForm as CheaperForm
from .suggesting import Suggestions as Suggestions
from .suggesting import suggest as suggest
