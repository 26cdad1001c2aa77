"""Repairs of Keras' and TensorFlow's silent defects: one file a defect, nothing patched before it is asked for."""

from tfopt.repairs.accumulation import ACCUMULATION
from tfopt.repairs.catalogue import FLOAT16, REPAIRS, REPLICAS, Status, install, remove, status
from tfopt.repairs.clear_session import CLEAR_SESSION
from tfopt.repairs.clipping import CLIPPING
from tfopt.repairs.loss_scaling import LOSS_SCALING, computes_in_float16, computing_layers
from tfopt.repairs.multi_worker import MULTI_WORKER
from tfopt.repairs.repair import Repair, fingerprint
from tfopt.repairs.replica_executions import REPLICA_EXECUTIONS
from tfopt.repairs.replica_overflow import REPLICA_OVERFLOW
from tfopt.repairs.uneven_batches import UNEVEN_BATCHES
from tfopt.repairs.unscaled_loss import UNSCALED_LOSS

__all__ = [
    "ACCUMULATION",
    "CLEAR_SESSION",
    "CLIPPING",
    "FLOAT16",
    "LOSS_SCALING",
    "MULTI_WORKER",
    "REPAIRS",
    "REPLICAS",
    "REPLICA_EXECUTIONS",
    "REPLICA_OVERFLOW",
    "UNEVEN_BATCHES",
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
