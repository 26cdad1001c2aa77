"""What a trace of TensorFlow's profiler holds."""

import copy

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2


def marked_steps(folder):
    """The numbers of the steps that are marked in a trace as XProf reads them, in their order."""
    (path,) = folder.glob("*.xplane.pb")
    found = []
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        names = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                stats = {names[stat.metadata_id]: stat.int64_value for stat in event.stats}
                if plane.event_metadata[event.metadata_id].name == "train" and stats.get("_r") == 1:
                    found.append((event.offset_ps, stats["step_num"]))
    return [step for _, step in sorted(found)]


def tiny_model(**options):
    """A model whose step takes a millisecond."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
    return model


def batches(count):
    """So many batches for it."""
    x = np.ones((2 * count, 4), "float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)


def write_gpu_trace(path, steps=4):
    """A trace as of steps of 10 ms on a GPU: kernels of 6 and 2 ms, launched within 2 ms from the marked step."""
    space = xplane_pb2.XSpace()
    host, gpu = _Plane(space, "/host:CPU", "python"), _Plane(space, "/device:GPU:0", "Stream #14(Compute)")
    for name, value in (("compute_cap_major", 9), ("compute_cap_minor", 0), ("core_count", 132)):
        gpu.add_stat(gpu.plane, name, value)
    for step in range(steps):
        begin = 10_000 * step
        host.add("train", begin, 2000, step_num=step, _r=1)
        for kernel, (operation, after, duration) in enumerate([("dense/MatMul", 0, 6000), ("conv/Conv2D", 6500, 2000)]):
            call = 2 * step + kernel + 1
            host.add("cuLaunchKernel", begin + 100 + 300 * kernel, 100, correlation_id=call)
            kind = f"{operation}:{operation.split('/')[1]}"
            gpu.add(f"kernel_{kernel}", begin + 300 + after, duration, correlation_id=call, tf_op=kind)
    path.write_bytes(space.SerializeToString())


def write_host_trace(path, steps, elsewhere=(), kernels=()):
    """A trace of marked steps of the main thread, each given as (number, begin, duration, wait), in microseconds.

    A thread of tf.data's waits from the step's beginning on. Of other threads' waits and the GPU's kernels, `elsewhere`
    and `kernels` give (begin, duration).
    """
    space = xplane_pb2.XSpace()
    host = _Plane(space, "/host:CPU", "python")
    data, other = host.another_line(), host.another_line()
    for number, begin, duration, wait in steps:
        host.add("train", begin, duration, step_num=number, _r=1)
        host.add("FunctionRun", begin, duration, id=1000 + number)
        data.add("IteratorGetNextOp::DoCompute", begin, wait, id=1000 + number)
    for begin, duration in elsewhere:
        other.add("IteratorGetNextOp::DoCompute", begin, duration, id=5)
    if kernels:
        gpu = _Plane(space, "/device:GPU:0", "Stream #14(Compute)")
        for begin, duration in kernels:
            gpu.add("kernel", begin, duration)
    path.write_bytes(space.SerializeToString())


class _Plane:
    """A plane of a trace, and the line to add to."""

    def __init__(self, space, name, line):
        self.plane = space.planes.add(name=name, id=len(space.planes))
        self.line = self.plane.lines.add(name=line, id=1)

    def another_line(self):
        """The same plane, with a line of its own to add to."""
        other = copy.copy(self)
        other.line = self.plane.lines.add(id=len(self.plane.lines) + 1)
        return other

    def add(self, name, begin_us, duration_us, **stats):
        event = self.line.events.add(offset_ps=begin_us * 10**6, duration_ps=duration_us * 10**6)
        event.metadata_id = self._id(self.plane.event_metadata, name)
        for stat, value in stats.items():
            self.add_stat(event, stat, value)

    def add_stat(self, to, name, value):
        kind = "str_value" if isinstance(value, str) else "int64_value"
        to.stats.add(metadata_id=self._id(self.plane.stat_metadata, name), **{kind: value})

    @staticmethod
    def _id(known, name):
        for number, metadata in known.items():
            if metadata.name == name:
                return number
        known[len(known) + 1].name = name
        known[len(known)].id = len(known)
        return len(known)
