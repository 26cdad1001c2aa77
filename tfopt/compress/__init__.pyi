from .costing import cost as cost
from .model_cost import LayerCost as LayerCost
from .model_cost import ModelCost as ModelCost
