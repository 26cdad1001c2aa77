"""The lines of code that take a cause away, as they fit the data and the callbacks of a training.

Each line says what to do with it, so that tests can do it:

- `# Before .shuffle(64):` and a line of calls: put these before that call of the dataset;
- `# Instead of .batch(32):` and a call: put this one in its place;
- `# First in Own.on_epoch_end:` and a block: put it at the beginning of that method;
- `model.fit(..., epochs=3)`: give this argument in that call; `# without x` behind it: and leave that one out;
- any other line: put it before `model.fit`, where `dataset` is what `fit` is given;
- any other comment is only to be read, and `NO_LINE` begins one that says why there is nothing to paste.
"""

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfopt.diagnosis.arms import FitArm
from tfopt.diagnosis.training import Training
from tfopt.pipelines import build_pipeline
from tfopt.pipelines.profiling.written_stages import Stage, batching, cached_where, plan_behind, stages
from tfopt.text import WIDTH

NO_LINE = "# No line to paste:"
_WORKERS = 4
_OFTEN = 5  # what happened once now happens every so many times


def no_line(reason: str) -> str:
    """A remedy that says why there are no lines."""
    return textwrap.fill(f"{NO_LINE} {reason}.", WIDTH - 4, subsequent_indent="# ", break_on_hyphens=False)


def slow_input(training: Training, limiting: str | None = None) -> str:
    """Lines that make the input faster; `limiting` is the stage that limits it, as `profile_pipeline` names it."""
    data = training.data
    if isinstance(data, keras.utils.PyDataset):
        if data.workers > 1:
            return no_line(f"its __getitem__ is the limit, though {data.workers} workers call it")
        return (
            "# Calls __getitem__ in several threads; one that draws at random draws in another order\n"
            f"dataset.workers, dataset.max_queue_size = {_WORKERS}, {4 * _WORKERS}"
        )
    if plan := plan_behind(data):
        if plan.options.cache is None and plan.options.balance is None:
            return 'build_pipeline(..., cache="memory")  # if the decoded examples fit there'
        return no_line(f"its cache: {plan.stage('cache').reason}. profile_pipeline(plan) names the slow stage")
    if isinstance(data, tf.data.Dataset):
        where = cached_where(data, limiting)
        return no_line(where) if isinstance(where, str) else _calls(*where)
    if isinstance(data, Iterator):
        return no_line("a generator yields one batch after the other; a keras.utils.PyDataset can have workers")
    return _as_pipeline(training)


def tried_input(training: Training) -> FitArm | None:
    """The training with the lines for its input carried out; None if that cannot be done from here."""
    data = training.data
    if isinstance(data, keras.utils.PyDataset):
        return FitArm(training, changes=[lambda model: _with_workers(data)]) if data.workers <= 1 else None
    if plan_behind(data) or isinstance(data, tf.data.Dataset | Iterator):
        return None
    return FitArm(training, dataset=build_pipeline(_arrays(training), **_options(training)))


@contextmanager
def _with_workers(data: keras.utils.PyDataset) -> Iterator[None]:
    before = data.workers, data.max_queue_size
    data.workers, data.max_queue_size = _WORKERS, 4 * _WORKERS
    try:
        yield
    finally:
        data.workers, data.max_queue_size = before


def _calls(before: str, calls: str, note: str) -> str:
    """Lines that put calls among those that make a dataset."""
    libraries = "import tensorflow as tf\n" if "tf." in calls else ""
    if before:
        return f"# {note[0].upper()}{note[1:]}\n{libraries}# Before {before}:\n{calls}"
    return f"# {note[0].upper()}{note[1:]}\n{libraries}dataset = dataset{calls}"


def _arrays(training: Training) -> Any:
    """The arrays as `build_pipeline` takes them."""
    given = [part for part in training.arrays if part is not None]
    return tuple(given) if len(given) > 1 else given[0]


def _options(training: Training) -> dict[str, Any]:
    """What `build_pipeline` is asked for, so that it does what `fit` does with arrays."""
    return {"batch_size": training.examples} | ({} if training.shuffled else {"shuffle": False})


def _as_pipeline(training: Training, **more: Any) -> str:
    """Lines that feed arrays through `build_pipeline`."""
    names = [name for name, part in zip(("x", "y", "sample_weight"), training.arrays, strict=True) if part is not None]
    options = "".join(f", {name}={value!r}" for name, value in (_options(training) | more).items())
    head = "from tfopt.pipelines import build_pipeline\n"
    gone = [*names[1:], "batch_size", *([] if training.shuffled else ["shuffle"])]

    def joined(part: str) -> str:
        each = ", ".join(f"{name}{part}" for name in names)
        return f"({each})" if len(names) > 1 else each

    if not training.validation_split:
        return (
            f"{head}dataset = build_pipeline({joined('')}{options})\n"
            f"model.fit(dataset, ...)  # without {', '.join(gone)}"
        )
    gone.append("validation_split")
    return (
        f"{head}cut = int(len(x) * (1 - {training.validation_split:g}))  # as validation_split does\n"
        f"dataset = build_pipeline({joined('[:cut]')}{options})\n"
        f"model.fit(dataset, ..., validation_data={joined('[cut:]')})  # without {', '.join(gone)}"
    )


def larger_batch(training: Training) -> str:
    """Lines that double the batch, after one that measures which size pays."""
    data, size, one = training.data, 2 * training.examples, "dataset"
    if plan_behind(data):
        line = f"build_pipeline(..., batch_size={size})"
    elif isinstance(data, keras.utils.PyDataset):
        line, one = no_line(f"let its __getitem__ return {size} examples"), "dataset[0]"
    elif isinstance(data, tf.data.Dataset):
        line = _batched(data, size, "")
    elif isinstance(data, Iterator):
        return f"{no_line(f'let the generator yield {size} examples')}\n# Changes the training: docs/diagnosis.md"
    else:
        names = [name for name, part in zip("xy", training.arrays, strict=False) if part is not None]
        one = f"({', '.join(f'{name}[:{size}]' for name in names)},)"
        line = f"model.fit(..., batch_size={size})"
    if training.steps_given and not line.startswith(NO_LINE):
        line += f"\nmodel.fit(..., steps_per_epoch={-(-training.steps_given // 2)})"
    measured = f"import tfopt\nprint(tfopt.batch.find(model, {one}))  # which size fits and pays"
    return f"{measured}\n{line}\n# Changes the training: docs/diagnosis.md"


def _batched(dataset: tf.data.Dataset, size: int, more: str) -> str:
    """Lines that batch a dataset otherwise."""
    first, *others = stages(dataset)
    written = next((one for one in reversed(others) if one.kind in ("batch", "padded_batch")), None)
    if written is not None and written.kind == "batch":
        drop = ", drop_remainder=True" * (bool(more) or bool(getattr(written.dataset, "_drop_remainder", False)))
        return f"# Instead of {written.call}:\n.batch({size}{drop})"
    if written is None and first.kind == "loader" and not more:
        return f"{first.call.replace('...', f'..., batch_size={size}')}"
    where = written.call if written else first.call
    return no_line(f"its batches come from {where}, whose other arguments do not show here")


def opened_each_epoch(training: Training) -> tuple[str, str]:
    """Lines for data that are opened in each epoch, and why that is slow; empty where `repeated` is to be tried."""
    data = training.data
    if not isinstance(data, tf.data.Dataset) or plan_behind(data):
        return no_line("fewer and longer epochs open the data less often"), ""
    before: list[Stage] = []
    for stage in stages(data):
        computing = [one for one in before if one.computes]
        if stage.kind == "shuffle" and computing:
            why = f"It fills the buffer of {stage.call} with what {computing[-1].call} computes."
            where = cached_where(data)
            return (no_line(where) if isinstance(where, str) else _calls(*where)), why
        # What a cache holds is not computed again.
        before = [] if stage.kind == "cache" else [*before, stage]
    return "", ""


def repeated(training: Training) -> str:
    """Lines that open the data once, and let the next epoch be read ahead."""
    return f"dataset = dataset.repeat()\nmodel.fit(..., steps_per_epoch={training.steps_per_epoch})"


def shapes(training: Training) -> str:
    """Lines that give batches one shape."""
    data = training.data
    if plan_behind(data):
        return 'build_pipeline(..., remainder="drop")  # if the last batch is smaller'
    if isinstance(data, keras.utils.PyDataset | Iterator):
        return no_line("give all batches one shape: leave the last, smaller one out, or pad")
    if not isinstance(data, tf.data.Dataset):
        return _as_pipeline(training, remainder="drop") + "\n# Leaves the last, smaller batch out"
    specs = tf.nest.flatten(data.element_spec)
    if not all(spec.shape.rank and spec.shape[1:].is_fully_defined() for spec in specs):
        return no_line(
            "pad all examples to one length, or to a few: padded_shapes in padded_batch, or bucket_by_sequence_length"
        )
    batch = batching(data)
    line = _batched(data, training.examples if batch is None else int(batch._batch_size), "drop_remainder")
    return line if line.startswith(NO_LINE) else f"{line}\n# Leaves the last, smaller batch out"


def validation(training: Training, batches: int) -> tuple[str, float]:
    """Lines for a validation that takes a fifth of the time, and the share of it that they save."""
    readers = [
        type(one).__name__
        for one in training.callbacks
        if str(getattr(one, "monitor", "")).startswith("val_") and getattr(one, "save_best_only", True)
    ]
    note = f"\n# {', '.join(readers)} then decides by that" if readers else ""
    often = _OFTEN * training.epochs_per_validation
    if often <= training.epochs:
        return f"model.fit(..., validation_freq={often}){note}", 1 - 1 / _OFTEN
    few = -(-batches // _OFTEN)
    line = f"model.fit(..., validation_steps={few})\n# Validates on a part of the data{note}"
    return (line, 1 - few / batches) if few < batches else (no_line("it is a single batch"), 0.0)


def in_each_batch(training: Training, callback: keras.callbacks.Callback, hooks: Sequence[str]) -> tuple[str, float]:
    """Lines that let a callback work on fewer batches, and the share of its time that they save."""
    name, steps = type(callback).__name__, training.steps_per_epoch
    owner = _owner(callback, hooks[0])
    if owner is None:
        frequency = getattr(callback, "save_freq", None)
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and isinstance(frequency, int):
            fewer = min(10 * frequency, (steps or 10 * frequency) * training.epochs)
            if fewer > frequency:
                return f"{name}(..., save_freq={fewer})", 1 - frequency / fewer
        elif isinstance(callback, keras.callbacks.BackupAndRestore) and isinstance(frequency, int):
            return f'{name}(..., save_freq="epoch")', 1 - frequency / max(frequency, steps or 100)
        elif isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq != "epoch":
            return f'{name}(..., update_freq="epoch")', 1.0
        return no_line(f"{name} has no option to do less in a batch"), 1.0
    share = max(0.0, 1 - training.model.steps_per_execution / min(100, steps or 100))
    methods = " and ".join(f"{owner.__name__}.{hook}" for hook in hooks)
    return (
        f"# Unless it changes what is trained; or do the work in a thread\n# First in {methods}:\n"
        f"if {_number(owner, hooks[0])} % 100 >= self.model.steps_per_execution:\n    return"
    ), share


def between_epochs(training: Training, callback: keras.callbacks.Callback, hook: str) -> tuple[str, float]:
    """Lines that let a callback do less in a hook between epochs, and the share of its time that they save."""
    name, epochs, steps = type(callback).__name__, training.epochs, training.steps_per_epoch or 0
    often = min(_OFTEN, epochs)
    if often < 2:
        return no_line(f"a training of one epoch runs {hook} once"), 0.0
    owner = _owner(callback, hook)
    if owner is not None and hook.startswith("on_epoch"):
        number = _number(owner, hook)
        return (
            f"# Unless it changes what is trained; or do the work in a thread\n# First in {owner.__name__}.{hook}:\n"
            f'if ({number} + 1) % {often} and {number} + 1 < self.params["epochs"]:\n    return'
        ), 1 - -(-epochs // often) / epochs
    if owner is not None:
        return no_line(f"{hook} receives no epoch; validation_freq={often} in fit runs it less often"), 0.0
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        logged = callback.save_best_only or "{" in callback.filepath.replace("{epoch", "")
        if logged:
            return no_line("its save_freq receives no logs of an epoch, which its monitor or file name asks for"), 1.0
        left = f"\n# Does not save the last {epochs % often} of the epochs" if epochs % often else ""
        return f"{name}(..., save_freq={often * steps}){left}", 1 - (epochs // often) / epochs
    if isinstance(callback, keras.callbacks.TensorBoard) and 0 < callback.histogram_freq < often:
        return f"{name}(..., histogram_freq={often})", 1 - callback.histogram_freq / often
    return no_line(f"{name} has no option to do less in {hook}"), 1.0


def _owner(callback: keras.callbacks.Callback, hook: str) -> type | None:
    """The user's class whose method a hook is; None if it is Keras' or tfopt's."""
    owner = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), type(callback))
    theirs = owner.__module__.startswith(("keras.", "tfopt.")) or isinstance(callback, keras.callbacks.LambdaCallback)
    return None if theirs else owner


def _number(owner: type, hook: str) -> str:
    """What a hook calls the number of the batch or epoch."""
    return list(inspect.signature(getattr(owner, hook)).parameters)[1]


def only_tried(remedy: str) -> str:
    """Says that the lines of a remedy were tried and gained nothing."""
    what = "build_pipeline" if "build_pipeline" in remedy else remedy.splitlines()[-1]
    return no_line(f"{what} was tried and is no faster here")


def only_said(remedy: str) -> bool:
    """Whether a remedy has no line to paste."""
    return all(line.startswith("#") for line in remedy.splitlines())
