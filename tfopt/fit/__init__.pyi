from .overlapping import overlap as overlap
from .overlapping import undo as undo
