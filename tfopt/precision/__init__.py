"""Mixed precision: which policy suits the device and the model, and putting a model under it and back.

`recommend` names a policy for the device; `set_policy` and `policy` set it for models made later, `apply` for an
existing one. `check` says whether a model may train under a policy, and `alignment` which of its sizes rule out fast
kernels.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
