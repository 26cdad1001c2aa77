"""Mixed precision: which policy suits the device and the model, and putting a model under it and back.

`recommend` names a policy for the device; `set_policy` and `policy` set it for the models to come, `apply` for one that
is there; `check` says whether it is safe for that one, and `alignment` which of its sizes keep fast kernels away.
"""

from tfopt.precision.alignment import alignment
from tfopt.precision.alignment_report import AlignmentReport
from tfopt.precision.applying import Applied, apply
from tfopt.precision.gate import check
from tfopt.precision.policies import policy, set_policy
from tfopt.precision.policy_names import POLICIES
from tfopt.precision.recommendation import Recommendation, recommend
from tfopt.precision.report import LayerPrecision, PrecisionReport
from tfopt.precision.tf32 import set_tf32, tf32

__all__ = [
    "POLICIES",
    "AlignmentReport",
    "Applied",
    "LayerPrecision",
    "PrecisionReport",
    "Recommendation",
    "alignment",
    "apply",
    "check",
    "policy",
    "recommend",
    "set_policy",
    "set_tf32",
    "tf32",
]
