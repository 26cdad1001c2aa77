from .inspecting import CheckpointReport as CheckpointReport
from .inspecting import SavedCheckpoint as SavedCheckpoint
from .inspecting import available as available
from .inspecting import verify as verify
from .restoring import Restored as Restored
from .restoring import restore as restore
