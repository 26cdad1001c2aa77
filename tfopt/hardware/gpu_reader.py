"""Reads the GPUs in NVML's thread, so that a slow or hung driver delays nobody."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from tfopt.hardware.inventory import Gpu, find_gpus, hides_all
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpu_reading import Reading
from tfopt.hardware.nvml.return_codes import NO_DRIVER, NvmlError
from tfopt.warn import warn_once

Answer = TypeVar("Answer")

# How far a GPU's reading may be from its row's time, and how long a row waits for it. Sixteen GPUs without GPM take
# 0.8 s; the default interval is 1 s.
_PROMPT_SECONDS = 0.9
# There in a container too, even one that was started without NVIDIA's library.
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


class GpuReader:
    """Reads the GPUs in NVML's thread, one round over all of them at a time; a slow driver delays nobody else.

    Args:
        environ: Where CUDA_VISIBLE_DEVICES is read.
        deadline_seconds: How long a GPU may take before a warning says that the driver hangs.
    """

    def __init__(self, environ: Mapping[str, str], deadline_seconds: float) -> None:
        self._environ = environ
        self._deadline_seconds = deadline_seconds
        self._gpus: tuple[Gpu, ...] | None = None  # None: not found yet
        self._read_before: set[str] = set()
        self._round: Future[Any] | None = None
        self._asked_at = 0.0
        # By UUID, when it was read. NVML's thread adds them, and each is taken once.
        self._readings: dict[str, tuple[float, Reading]] = {}
        self._answered = threading.Event()
        self._closed = False

    def read(self) -> tuple[tuple[Gpu, Reading], ...]:
        """Returns each GPU found so far with its reading of now, an empty one if the driver takes longer.

        A round that takes longer goes on meanwhile, and what it reads is for the call that comes next, or for none.
        """
        now = time.monotonic()
        if self._round is None or self._round.done():
            self._begin_round()
        elif now - self._asked_at > self._deadline_seconds:
            driver.door().give_up(self._round)
            self._warn_hung()
        return tuple((gpu, self._reading(gpu, now)) for gpu in self._gpus or ())

    def close(self) -> None:
        """Ends the round after the GPU that it reads, and ends the wait for it."""
        self._closed = True
        self._answered.set()
        if self._round is not None:
            self._round.cancel()

    def _begin_round(self) -> None:
        """Asks for every GPU's reading, and waits for them a moment."""
        if self._gpus is None and hides_all(self._environ):
            self._gpus = ()
        if self._gpus == ():
            return
        nvml = driver.door()
        answered = self._answered = threading.Event()
        self._asked_at = time.monotonic()
        try:
            self._round = nvml.submit(lambda: self._read_all(nvml))
        except TimeoutError:
            self._warn_hung()
            return
        except RuntimeError as error:  # no thread is to be had
            text = f"Expected to start a thread that reads the GPUs. Found: {error}. The host is still sampled."
            warn_once("nvml thread", f"{text} What to do: check the process limit (ulimit -u; the cgroup's pids.max).")
            return
        self._round.add_done_callback(lambda _: answered.set())
        if not self._closed:
            answered.wait(min(_PROMPT_SECONDS, self._deadline_seconds))

    def _read_all(self, nvml: driver.Nvml) -> None:
        """A round, in NVML's thread."""
        if self._gpus is None:
            self._gpus = self._find(nvml)
        for gpu in self._gpus:
            if self._closed:
                return
            began = self._asked_at = time.monotonic()
            reading = self._read_one(nvml, gpu)
            ended = time.monotonic()
            if ended - began <= _PROMPT_SECONDS:  # otherwise its fields are from different times
                self._readings[gpu.uuid] = ended, reading
            elif ended - began <= self._deadline_seconds:
                warn_once(
                    f"slow {gpu.uuid}",
                    f"Expected to read GPU:{gpu.index} within {_PROMPT_SECONDS:g} s. Found: it took "
                    f"{ended - began:.1f} s; readings that late are left out. What to do: nothing if this is "
                    "rare; otherwise run nvidia-smi, and if it is slow too, look for Xid lines in dmesg.",
                )

    def _find(self, nvml: driver.Nvml) -> tuple[Gpu, ...]:
        try:
            return _explained(lambda: find_gpus(nvml, self._environ))
        except NvmlError as error:
            none = "Found no NVIDIA GPU: sampling the host alone."
            if error.cause == "library_not_found" and not _KERNEL_DRIVER.exists():
                warn_once(error.cause, none)
            else:
                warn_once(error.cause, f"{none} {error}" if error.cause in NO_DRIVER else str(error))
            return ()

    def _read_one(self, nvml: driver.Nvml, gpu: Gpu) -> Reading:
        restart = gpu.uuid not in self._read_before
        self._read_before.add(gpu.uuid)
        try:
            return _explained(lambda: nvml.read(gpu.uuid, restart=restart))
        except NvmlError as error:
            xid = nvml.last_xid(gpu.uuid)
            last = "" if xid is None else f" Its last Xid was {xid}."
            warn_once(f"{error.cause} {gpu.uuid}", f"GPU:{gpu.index}: {error}{last}")
            return Reading(gpu_xid=xid)

    def _reading(self, gpu: Gpu, now: float) -> Reading:
        read_at, reading = self._readings.pop(gpu.uuid, (now, Reading()))
        return reading if now - read_at <= _PROMPT_SECONDS else Reading()

    def _warn_hung(self) -> None:
        error = driver.hung(self._deadline_seconds)
        warn_once(error.cause, str(error))


def _explained(question: Callable[[], Answer]) -> Answer:
    """Returns the driver's answer, or raises NvmlError: the host and the other GPUs are still read."""
    try:
        return question()
    except NvmlError:
        raise
    except Exception as error:
        raise NvmlError(
            f"unexpected {type(error).__name__}",
            f"Expected NVIDIA's driver to answer. Found: {error!r}. What to do: update nvidia-ml-py.",
        ) from error
