"""What `tfopt-bench doctor` puts into the process of a training script: diagnoses what a call of `Model.fit` trains.

Python runs the script as ever, and calls `install` before that. Keras is not imported before the script does.
"""

import atexit
import importlib.machinery
import inspect
import json
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tfopt.errors import TfoptError, UnsupportedError
from tfopt.internals.patches import Function, Patch, put

ANSWER, PAGE = "answer.json", "page.html"
DIAGNOSE, TUNE, TIME = "diagnose", "tune", "time"
_KERAS = ("keras", "tf_keras")  # the second is Keras 2, which TF_USE_LEGACY_KERAS=1 chooses
_EXIT_SECONDS = 5.0
_BY = "tfopt-bench doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to do instead of a call of `Model.fit`."""

    kind: str = DIAGNOSE
    """Or TUNE: find, too, which changes pay; or TIME: train, up to some steps."""
    fit: int = 1
    """Which call, from 1. Earlier ones train as usual."""
    steps: int = 50
    """Steps of each experiment, or of the training to time."""
    page: bool = False
    """Whether to write the diagnosis as an HTML page."""
    causes: tuple[str, ...] = ()
    """Of a training to time: what to take away before, as in `Tuning.applied`."""


def install(folder: str, environ: Mapping[str, str | None], alive: int, **options: Any) -> None:
    """Examines a call of `Model.fit` in this process, then ends the process.

    Child processes are left alone: those started anew get no hook, and in forked ones `fit` trains as usual.

    Args:
        folder: Where the answer goes: `ANSWER`, and `PAGE` if `page` is true.
        environ: Environment variables to restore before the script sees them; None stands for one that was not set.
        alive: A file descriptor that is at its end once the doctor is gone: then this process ends, too.
        options: The fields of `Task`.
    """
    for name, value in environ.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    os.set_inheritable(alive, False)
    doctor = _Doctor(Path(folder), Task(**options))

    def meet(keras: ModuleType) -> None:
        doctor.meet(keras)
        # Not before TensorFlow has threads, too: Python warns of a fork beside threads.
        threading.Thread(target=_end_with_doctor, args=(alive, folder), daemon=True).start()

    sys.meta_path.insert(0, _WhenImported(meet))
    atexit.register(doctor.report)  # the first to be registered is the last to be called


def _end_with_doctor(alive: int, folder: str) -> None:
    """Waits for the doctor's end, then ends what the script has started, removes the doctor's folder, and ends this."""
    try:
        os.read(alive, 1)
    except OSError:  # the script has closed it
        return
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class _WhenImported:
    """An import hook: calls a function with Keras once the script has imported it."""

    def __init__(self, then: Callable[[ModuleType], None]):
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the module as the other import hooks find it, with a loader that also calls the function."""
        if name not in _KERAS:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found), None)
        loader: Any = spec and spec.loader
        if loader:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec


class _Doctor:
    """Counts what the script calls, and diagnoses the training that it was asked for."""

    def __init__(self, folder: Path, task: Task):
        self._folder, self._task = folder, task
        self._process = os.getpid()
        self._calls: Counter[str] = Counter()
        self._outcome: dict[str, Any] = {}

    def meet(self, keras: ModuleType) -> None:
        """Patches Keras' own `fit`. A model that overrides it is met when it calls `super().fit`."""
        self._calls["import"] += 1
        trainer = next(base for base in keras.Model.__mro__ if "fit" in vars(base))

        def held(stock: Function) -> Function:
            def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
                self._calls["fit"] += 1
                if self._calls["fit"] != self._task.fit or os.getpid() != self._process:
                    return stock(model, *args, **kwargs)
                given = inspect.signature(stock.__get__(model)).bind(*args, **kwargs)
                given.apply_defaults()
                tempfile.tempdir = str(self._folder)  # removed even if the process is killed meanwhile
                if type(model).fit is not trainer.fit:  # its own has prepared these arguments, and would do so again
                    vars(model)["fit"] = stock.__get__(model)
                self.report()  # the experiments may kill the process
                self._outcome = self._examine(keras, model, given.arguments, stock)
                self.report()
                _end_process()

            return fit

        counted = self._counted("train_on_batch")
        patches = [Patch(trainer, "fit", held, _BY), Patch(trainer, "train_on_batch", counted, _BY)]
        if "tensorflow" in sys.modules:
            tape = sys.modules["tensorflow"].GradientTape
            patches.append(Patch(tape, "__enter__", self._counted("GradientTape"), _BY))
        put(patches)

    def _examine(
        self, keras: ModuleType, model: Any, arguments: Mapping[str, Any], stock: Callable[..., Any]
    ) -> dict[str, Any]:
        try:
            _require_supported(keras)
            if self._task.kind == TIME:
                return self._time(model, arguments, stock)
            return self._diagnose(model, arguments)
        except TfoptError as error:
            return {"refused": str(error)}
        except (ValueError, TypeError) as error:  # without the doctor it shows its traceback
            return {"failed": f"{type(error).__name__}: {error}"}
        except Exception as error:  # noqa: BLE001  the script must not go on after it
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}

    def _time(self, model: Any, arguments: Mapping[str, Any], stock: Callable[..., Any]) -> dict[str, Any]:
        from tfopt.bench.timed_fit import timed_fit

        how = "as it is" if not self._task.causes else "tuned"
        sys.stderr.write(f"tfopt-bench: timing the script itself, {how}\n")
        return {"timed": timed_fit(stock, model, arguments, self._task.steps, self._task.causes)}

    def _diagnose(self, model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        from tfopt.diagnosis.diagnosing import diagnose_fit

        sys.stderr.write("tfopt-bench: timing this fit instead of training; the script ends afterwards\n")
        outcome = {}
        if self._task.kind == TUNE:
            from tfopt.diagnosis.tuning import tune_fit

            tuning = tune_fit(model, arguments, steps=self._task.steps)
            diagnosis = tuning.diagnosis
            outcome = {"tuning": tuning.to_dict() | {"text": str(tuning)}}
        else:
            diagnosis = diagnose_fit(model, arguments, self._task.steps)
        if self._task.page:
            diagnosis.to_html(self._folder / PAGE)
        return outcome | {"diagnosis": diagnosis.to_dict(), "text": str(diagnosis)}

    def report(self) -> None:
        """Writes what is known so far."""
        if os.getpid() == self._process:
            part = self._folder / f"{ANSWER}.part"
            with suppress(OSError):  # nobody waits for it any more
                part.write_text(json.dumps({"calls": self._calls} | self._outcome), encoding="utf-8")
                part.rename(self._folder / ANSWER)

    def _counted(self, what: str) -> Callable[[Function], Function]:
        def counting(stock: Function) -> Function:
            def counted(*args: Any, **kwargs: Any) -> Any:
                self._calls[what] += 1
                return stock(*args, **kwargs)

            return counted

        return counting


def _require_supported(keras: ModuleType) -> None:
    if keras.__name__ == "tf_keras":
        found = "Keras 2 (tf_keras). Run it with Keras 3: without TF_USE_LEGACY_KERAS, and with `import keras`"
    elif keras.config.backend() != "tensorflow":
        found = f"Keras on {keras.config.backend()}. Run it with KERAS_BACKEND=tensorflow"
    else:
        return
    raise UnsupportedError(f"Expected a script that trains with Keras 3 on TensorFlow. Found {found}.")


def _end_process() -> NoReturn:
    """Ends the process from any thread. An exception would not: the script may catch it, and clean up at length."""

    def leave() -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the script may have replaced them
                stream.flush()
        os._exit(0)

    late = threading.Timer(_EXIT_SECONDS, leave)  # multiprocessing's handler waits for processes that wait for data
    late.daemon = True
    late.start()
    try:
        atexit._run_exitfuncs()
    finally:
        leave()
