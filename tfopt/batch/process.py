"""Where trials run: in a process with a copy of the model, or in this one."""

import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import keras

from tfopt.batch.copying import copied_here, to_copy
from tfopt.batch.examples import Examples
from tfopt.batch.limits import Limits, room_outside_mib
from tfopt.batch.trials import Result, Trial, try_here
from tfopt.errors import UnsupportedError
from tfopt.processes import Child, describe_end, exit_code, limit

_SECONDS = 300.0  # for one trial, or for the process to start and copy the model
_GPU_HELD = "TensorFlow holds the GPU's memory here, so that another process could not take enough"


class Trials:
    """Tries batch sizes, in a process of their own where that is possible.

    Args:
        model: Compiled, and built with its optimizer.
        examples: What the batches are made of.
    """

    def __init__(self, model: keras.Model, examples: Examples):
        self._model, self._examples = model, examples
        self._process: TrialProcess | None = None
        self._room_mib = room_outside_mib()
        self.here_because = ""
        """Why trials run, or have run, in this process."""

    def __enter__(self) -> Self:
        try:
            if self._room_mib <= 0:
                raise UnsupportedError(_GPU_HELD)
            self._process = TrialProcess(self._model, self._examples.batch(self._examples.batch_size))
        except UnsupportedError as error:
            self.here_because = str(error)
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.close()

    @property
    def safe(self) -> bool:
        """Whether a batch that is too large ends no more than its trial; on a GPU, TensorFlow raises an error."""
        return self._process is not None or self._room_mib < float("inf")

    def __call__(self, size: int, within: Limits) -> Trial:
        """Tries one size."""
        estimated = within.estimated_mib(size)
        result, own = self._run(self._examples.batch(size), estimated)
        return Trial(batch_size=size, estimated_mib=estimated, own_process=own, **result._asdict())

    def _run(self, batch: Any, estimated_mib: float | None) -> tuple[Result, bool]:
        """The result, and whether it comes from the other process."""
        limited = self._room_mib < float("inf")  # a GPU, of which the other process gets only the rest
        if self._process is not None and limited and (estimated_mib is None or estimated_mib > self._room_mib):
            self.here_because = _GPU_HELD
        elif self._process is not None:
            try:
                return self._process(batch), True
            except UnsupportedError as error:
                self._process, self.here_because = None, str(error)
        return try_here(self._model, batch), False


class TrialProcess:
    """A process with a copy of a model, in which batch sizes are tried. After its death it starts again.

    Args:
        model: Compiled, and built with its optimizer.
        batch: One that it trains on, as arrays.

    Raises:
        tfopt.errors.UnsupportedError: If the model cannot be copied; the message is a part of a sentence.
    """

    def __init__(self, model: keras.Model, batch: Any):
        self._start_message = to_copy(model), batch
        self._start()

    def __call__(self, batch: Any) -> Result:
        """Tries a batch; raises UnsupportedError if the process died before and does not start again."""
        if self._child.process.returncode is not None:
            self._start()
        result: Result = self._ask(batch)
        return result

    def close(self) -> None:
        """Ends the process."""
        self._child.close()

    def _start(self) -> None:
        self._child = Child(serve, os.environ | {"TF_FORCE_GPU_ALLOW_GROWTH": "true"})
        try:
            if failure := self._ask(self._start_message):
                raise UnsupportedError(failure.reason)
        except BaseException:
            self.close()
            raise

    def _ask(self, message: Any) -> Any:
        """Returns the process's answer, or the Result that stands for its end."""
        with limit(self._child.process, _SECONDS) as late:
            try:
                self._child.connection.send(message)
                return self._child.connection.recv()
            except (EOFError, OSError):
                code = exit_code(self._child.process)
        self.close()
        if late.is_set():
            return Result("hung", f"the trial's process did not answer within {_SECONDS:g} s")
        hint = ", as the system does when its memory runs out" if code == -signal.SIGKILL else ""
        return Result("killed", f"the trial's process {describe_end(code)}{hint}")


def serve(connection: "Connection[Any, Any]") -> None:
    """What the process does: it copies the model, and then tries each batch that it receives."""
    with suppress(OSError):  # so that the kernel kills this process, not its parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        copy, batch = connection.recv()
        model = copied_here(copy, batch)
    except Exception as error:  # noqa: BLE001  it is raised where the process was started
        connection.send(Result("failed", str(error)))
        return
    connection.send(None)
    with suppress(EOFError):
        while True:
            connection.send(try_here(model, connection.recv()))
