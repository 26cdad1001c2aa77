"""Mixed precision: which policy suits the device, and setting it so that it can be taken back."""

from tfopt.precision.alignment import alignment
from tfopt.precision.alignment_report import AlignmentReport
from tfopt.precision.applying import Applied, apply
from tfopt.precision.gate import check
from tfopt.precision.policies import POLICIES, policy, set_policy
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
