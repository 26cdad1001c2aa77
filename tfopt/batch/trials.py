"""One trial of a batch size: a few real training steps."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfopt.errors import summarize_error
from tfopt.hardware import gpu_memory
from tfopt.hardware.host_limits import MIB
from tfopt.measure import StepTimer, StepTimes
from tfopt.memory.out_of_memory import is_out_of_memory

Outcome = Literal["fits", "out of memory", "killed", "hung", "failed"]

_ENOUGH_MS = 500.0  # of timed steps
_SAMPLES = 10
_MOST_STEPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One batch size, tried."""

    batch_size: int
    outcome: Outcome
    """"fits", or why it does not: "out of memory", "killed" or "hung" (the trial's process), or "failed"."""
    reason: str = ""
    """What was found, if it does not fit."""
    times: StepTimes | None = None
    """The measured steps; None if it does not fit."""
    estimated_mib: float | None = None
    """What a step takes by `tfopt.memory.estimate`, on straight lines between two of them; None if unknown."""
    peak_mib: float | None = None
    """The most that TensorFlow had in use on the GPU during the steps; None without a GPU."""
    own_process: bool = False
    """Whether it ran in a process of its own."""

    @property
    def fits(self) -> bool:
        """Whether the steps ran."""
        return self.times is not None

    @property
    def ms_per_step(self) -> float | None:
        """The median."""
        return self.times.median_ms if self.times else None

    @property
    def examples_per_second(self) -> float | None:
        """Throughput at the median."""
        return self.times.examples_per_second if self.times else None

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        derived = {"ms_per_step": self.ms_per_step, "examples_per_second": self.examples_per_second}
        return asdict(self) | derived | {"times": self.times.to_dict() if self.times else None}


class Result(NamedTuple):
    """What a trial found, wherever it ran."""

    outcome: Outcome
    reason: str = ""
    times: StepTimes | None = None
    peak_mib: float | None = None


def try_here(model: keras.Model, batch: Any) -> Result:
    """Runs training steps on a batch in this process, and leaves the model as it was."""
    try:
        return _measured(model, batch)
    except Exception as error:  # noqa: BLE001  whatever the model's own code raises
        return Result("out of memory" if is_out_of_memory(error) else "failed", summarize_error(error))


def _measured(model: keras.Model, batch: Any) -> Result:
    device = gpu_memory.first_gpu()
    if device:
        gpu_memory.reset_peak(device)
    timer = StepTimer(model, tf.data.Dataset.from_tensors(batch))  # as a tuple, a large batch would draw a warning
    times = timer(2, warmup=0, samples=2)
    steps = min(_MOST_STEPS, int(_ENOUGH_MS / times.median_ms))
    if steps > 2:
        times = timer(steps, warmup=1, samples=_SAMPLES)
    return Result("fits", times=times, peak_mib=gpu_memory.peak_bytes(device) / MIB if device else None)
