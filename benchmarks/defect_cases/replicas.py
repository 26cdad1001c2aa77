"""Two replicas on two logical CPU devices, whose result should be one device's; and accumulated gradients."""

from functools import partial

import tensorflow as tf

import tfopt
from defect_cases import Case, repaired
from tfopt.repairs.probes import one_device, replicas


def on_two(with_tfopt, folder, measure):
    """What a probe measures on two logical devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tfopt.distribute.strategy("auto") if with_tfopt else replicas.two_replicas()
    assert strategy.num_replicas_in_sync == 2
    return measure(strategy)


CASES = tuple(
    Case(defect, figure, right, partial(on_two, measure=measure), tolerance)
    for defect, figure, right, measure, tolerance in (
        ("D1", "weights that are not finite after an overflow in replica 2", 0, replicas.not_finite, 0),
        ("D1", "loss scale after it, from 32,768", replicas.SCALE / 2, replicas.scale_after, 0),
        ("D2", "largest error of a weight after 81 examples in batches of 32", 0, replicas.uneven_batches, 1e-6),
        ("D3", "norm of the update at `global_clipnorm=1`", 1, replicas.clipped, 1e-4),
        ("D24", "weight after a step of 1 along a penalty added to `compute_loss`", -1, replicas.penalty_by_hand, 1e-6),
        ("D25", "weight after a step of 1 along a sum over 8 examples", -8, replicas.sum_in_training, 1e-6),
        ("D26", "moving mean of a batch whose halves are ones and threes", 2, replicas.masked_mean, 1e-4),
    )
) + tuple(
    Case("D6", figure, right, partial(repaired, name="accumulation", measure=measure), 1e-6)
    for figure, right, measure in (
        ("rate of update 2, scheduled as 1/update, with 4 batches an update", 0.5, one_device.second_rate),
        ("updates by two epochs of 5 batches, with 4 an update", 4, one_device.updates),
    )
)
