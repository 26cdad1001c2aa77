"""Repairs of Keras' and TensorFlow's silent defects: one file a defect, nothing patched before it is asked for."""

from tfopt.repairs.catalogue import FLOAT16, REPAIRS, Status, install, remove, status
from tfopt.repairs.clear_session import CLEAR_SESSION
from tfopt.repairs.loss_scaling import LOSS_SCALING, computes_in_float16, computing_layers
from tfopt.repairs.repair import Repair, fingerprint
from tfopt.repairs.replica_overflow import REPLICA_OVERFLOW
from tfopt.repairs.unscaled_loss import UNSCALED_LOSS

__all__ = [
    "CLEAR_SESSION",
    "FLOAT16",
    "LOSS_SCALING",
    "REPAIRS",
    "REPLICA_OVERFLOW",
    "UNSCALED_LOSS",
    "Repair",
    "Status",
    "computes_in_float16",
    "computing_layers",
    "fingerprint",
    "install",
    "remove",
    "status",
]
