"""Finds the batch size that pays: the largest that fits, and the smallest that is about as fast as any."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras

from tfopt import checks
from tfopt.batch.examples import Examples
from tfopt.batch.growing import grow, on_grid, recommended
from tfopt.batch.limits import Limits, limits
from tfopt.batch.process import Trials
from tfopt.batch.trials import Trial
from tfopt.errors import TfoptError, UnsupportedError, summarize_error, unknown_name
from tfopt.files import write_atomic
from tfopt.measure import preserved
from tfopt.model.batches import Data, specs_of
from tfopt.model.layers import require_optimizer
from tfopt.model.state import trace_train_step
from tfopt.model.undoing import only_looks
from tfopt.page import Bar, Page, Section, Table, bar_chart, render
from tfopt.page.bars import Tone
from tfopt.text import Shown, aligned, figure, wrapped

_GOALS = ("throughput",)
_ENDS = {"out of memory": "ran out of memory", "killed": "was killed", "hung": "hung", "failed": "failed"}
_CHANGES = (
    "A larger batch changes the training: it makes fewer updates per epoch. The learning rate is untouched and may "
    "need tuning."
)
_MORE_ROOM = "Allow or free more memory, or let a step take less: tfopt.memory.recompute(model), or a smaller model."


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BatchSearch(Shown):
    """Which batch sizes fit, and how fast each is."""

    largest: int
    """The largest batch found to fit, a multiple of 8 above 8; 0 if none fits."""
    recommended: int
    """The smallest within 3 % of the best throughput, a multiple of 8 above 8; 0 if none fits."""
    trials: tuple[Trial, ...]
    """All that were tried, by batch size."""
    bounded_by: str
    """Why nothing larger than `largest` counts."""
    in_this_process: str
    """Why trials ran in this process; empty if all ran in a process of their own."""

    def accumulation_steps(self, effective: int) -> int:
        """Returns how many batches of the recommended size make an effective batch of `effective` examples.

        Raises:
            ValueError: If `effective` is not a multiple of `recommended`, or none fits.

        Example:
            >>> found.recommended, found.accumulation_steps(1024)
            (256, 4)
        """
        effective = checks.count("effective", effective, "Pass a number of examples.")
        if not self.recommended:
            raise ValueError("Expected a batch size that fits. Found: none. Free memory, or make the model smaller.")
        steps, rest = divmod(effective, self.recommended)
        if rest:
            near = [str(count * self.recommended) for count in (steps, steps + 1) if count]
            raise ValueError(
                f"Expected an effective batch that is a multiple of {self.recommended}, the recommended size. "
                f"Received: {effective}. Pass {' or '.join(near)}."
            )
        return steps

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        names = ("largest", "recommended", "bounded_by", "in_this_process")
        return {name: getattr(self, name) for name in names} | {"trials": [trial.to_dict() for trial in self.trials]}

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes it as a self-contained HTML page with charts, and returns the page's path.

        Raises:
            tfopt.errors.UnsupportedError: If jinja2 is not installed.
            OSError: If the file cannot be written.
        """
        write_atomic(path, self._page())
        return Path(path)

    def __str__(self) -> str:
        headers, rows = self._table()
        table = ["\n".join(aligned([headers, *rows], texts=0))] if rows else []
        reasons = [f"{trial.batch_size}: {trial.outcome}: {trial.reason}." for trial in self._failed]
        notes = [*reasons, *([_CHANGES] if self.recommended else []), *self._where()]
        return "\n\n".join([wrapped(self._lead()), *table, wrapped("\n".join(notes))]).strip()

    @property
    def _failed(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.fits]

    def _lead(self) -> str:
        if not self.recommended:
            return f"No batch fits; the limit is {self.bounded_by}. {_MORE_ROOM}"
        rates = {trial.batch_size: trial.examples_per_second for trial in self.trials if trial.examples_per_second}
        best = max(rates, key=lambda size: rates[size])
        than = (
            "the fastest"
            if best == self.recommended
            else f"the smallest within 3 % of the fastest, {best:,} ({figure(rates[best])})"
        )
        return (
            f"Batch size {self.recommended:,}: {figure(rates[self.recommended])} examples/s, {than}. The largest "
            f"found to fit is {self.largest:,}; the limit is {self.bounded_by}."
        )

    def _where(self) -> list[str]:
        return [f"Trials ran in this process: {self.in_this_process}."] if self.in_this_process else []

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows; a column in which nothing is known is left out."""
        columns: dict[str, list[str | None]] = {
            "batch": [f"{trial.batch_size:,}" for trial in self.trials],
            "ms a step": [_known(trial.ms_per_step) for trial in self.trials],
            "examples/s": [_known(trial.examples_per_second) for trial in self.trials],
            "estimated MiB": [_known(trial.estimated_mib) for trial in self.trials],
            "peak MiB": [_known(trial.peak_mib) for trial in self.trials],
            "": [self._note(trial) for trial in self.trials],
        }
        known = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
        return list(known), [[cell or "–" for cell in row] for row in zip(*known.values(), strict=True)]

    def _note(self, trial: Trial) -> str:
        marks = {"recommended": self.recommended, "largest": self.largest}
        named = [name for name, size in marks.items() if size == trial.batch_size]
        return ", ".join(named) or trial.outcome

    def _page(self) -> str:
        charts = [
            self._chart("Throughput", "examples_per_second", "Examples per second"),
            self._chart("Memory of a step", "estimated_mib", "Estimated MiB"),
            self._chart("Peak on the GPU", "peak_mib", "Measured MiB"),
        ]
        headers, rows = self._table()
        reasons = [(f"{trial.batch_size:,}", trial.outcome, trial.reason) for trial in self._failed]
        failed = [Table(("Batch", "Outcome", "Reason"), reasons, align="rll", caption="Did not fit")] if reasons else []
        trials = Table(headers, rows, align="r" * (len(headers) - 1) + "l") if rows else None
        return render(
            Page(
                title="Which batch size?",
                lead="\n\n".join([self._lead(), _CHANGES, *self._where()]),
                sections=[
                    Section("Over batch size", charts=[chart for chart in charts if chart]),
                    Section("Trials", tables=[*([trials] if trials else []), *failed]),
                ],
                figures=[
                    ("Recommended", f"{self.recommended:,}", "examples"),
                    ("Largest", f"{self.largest:,}", "examples"),
                ],
            )
        )

    def _chart(self, title: str, name: str, unit: str) -> str:
        known = [(trial, value) for trial in self.trials if (value := getattr(trial, name)) is not None]
        bars = [self._bar(trial, value) for trial, value in known]
        return bar_chart(bars, title=title, description=f"{unit}, by batch size.") if bars else ""

    def _bar(self, trial: Trial, value: float) -> Bar:
        tone, meaning = self._kind(trial)
        note = "" if meaning == "fits" else f", {self._note(trial)}"
        return Bar(f"{trial.batch_size:,}", value, f"{figure(value)}{note}", tone=tone, meaning=meaning)

    def _kind(self, trial: Trial) -> tuple[Tone, str]:
        """How a bar looks, and what that means."""
        if trial.batch_size == self.recommended:
            return "better", "recommended"
        return ("plain", "fits") if trial.fits else ("worse", "does not fit")


@only_looks
def find(
    model: keras.Model,
    data: Data,
    *,
    largest: int | None = None,
    goal: str = "throughput",
    limit_mib: float | None = None,
) -> BatchSearch:
    """Finds the largest batch that fits, and the smallest that trains about as many examples per second as any.

    Batch sizes are tried by real training steps. They double from 8 up to what fits the memory by
    `tfopt.memory.estimate`; then the gaps that matter are halved, in multiples of 8 and down to 1 % of the size. The
    trials run in a separate process, which may be killed or hang without harm, if the model can be copied there and the
    GPU's memory allows it. Otherwise they run in this process.

    The model comes back unchanged, bit for bit: weights, optimizer, metrics, seeds and compile settings. A model that
    is not built yet is built. A shuffled dataset keeps its order; what a generator has yielded is used up. On a GPU,
    the peak that `tfopt.memory.usage` reports is reset.

    Args:
        model: A compiled model on one device.
        data: A tf.data.Dataset of batches, or one batch: (x, y[, sample_weight]). Batches are made of the examples of
            its first 16, repeated if there are too few.
        largest: The largest batch to try. None: as large as fits, while a step takes at most 10 s.
        goal: "throughput", the only one so far.
        limit_mib: MiB that a step may take by the estimate, weights included. None: on a GPU the memory that is free
            for TensorFlow, otherwise nine tenths of what this process can still allocate.

    Returns:
        The sizes, with all trials.

    Raises:
        TypeError: If `model` is not a Keras model, or `data` neither a dataset nor a batch.
        ValueError: If the model is not compiled with an optimizer or cannot train on the data, or if an argument is out
            of range.
        tfopt.errors.PipelineError: If the data hold no example, or cannot be read.
        tfopt.errors.UnsupportedError: If the model trains on several replicas, if the data are sparse or ragged, or if
            there is `limit_mib` and no estimate.
        tfopt.errors.TfoptError: If every trial fails for another reason than memory.

    Example:
        >>> found = tfopt.batch.find(model, dataset)
        >>> found.recommended, found.largest
        (256, 1024)
        >>> dataset = dataset.unbatch().batch(found.recommended)
    """
    largest, limit_mib = _checked(model, largest, goal, limit_mib)
    examples = Examples(model, data)
    graph = _traced(model, examples)
    with preserved(model, also=graph.variables), Trials(model, examples) as trials:
        return _search(model, examples, trials, largest, limit_mib)


def _checked(
    model: keras.Model, largest: int | None, goal: str, limit_mib: float | None
) -> tuple[int | None, float | None]:
    require_optimizer(model)
    if goal not in _GOALS:
        raise unknown_name("goal", goal, _GOALS)
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise UnsupportedError(
            f"Expected a model on one device. Found: {model.name!r} trains on {replicas} replicas. Build it outside "
            "the strategy's scope; the batch of all replicas is what fits one, times their number."
        )
    if largest is not None:
        largest = checks.count("largest", largest, "Pass the largest batch to try.")
    if limit_mib is not None:
        limit_mib = checks.number("limit_mib", limit_mib, "Pass the MiB that a step may take.", above=0)
    return largest, limit_mib


def _traced(model: keras.Model, examples: Examples) -> Any:
    """The graph of a step on the data's own batch, which also builds the model, its optimizer and its metrics."""
    try:
        return trace_train_step(model, examples.first)[1]
    except TfoptError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(
            f"Expected a batch that {model.name!r} can train on. Found: {specs_of(examples.first)}, which fails: "
            f"{summarize_error(error)}. Pass batches (x, y[, sample_weight]) as model.fit takes them."
        ) from error


def _search(
    model: keras.Model, examples: Examples, trials: Trials, largest: int | None, limit_mib: float | None
) -> BatchSearch:
    bounds = limits(model, examples, largest, limit_mib)
    if bounds.most is None and not bounds.known_mib and not trials.safe:
        why = "the batch size of the data: what a larger one takes is unknown, and it might end this process"
        bounds = replace(bounds, most=examples.batch_size, why=why)
    made = _made(trials, bounds, examples.batch_size)
    largest_found = max((size for size, trial in made.items() if trial.fits), default=0)
    failed = next((trial for trial in made.values() if trial.outcome == "failed"), None)
    if failed and not largest_found:
        raise TfoptError(
            f"Expected a step of {model.name!r} that runs. Found: on {failed.batch_size} examples it fails: "
            f"{failed.reason}. Try model.fit on one batch, and correct what it reports."
        )
    return BatchSearch(
        largest=largest_found,
        recommended=recommended(made),
        trials=tuple(made[size] for size in sorted(made)),
        bounded_by=_bound(made, bounds, largest_found),
        in_this_process=trials.here_because,
    )


def _made(trials: Trials, bounds: Limits, own: int) -> dict[int, Trial]:
    """All trials; the last is of the data's own batch size if none fits, as some models take no other."""
    if bounds.fixed:
        return {bounds.most: trials(bounds.most, bounds)} if bounds.most else {}
    made = grow(lambda size: trials(size, bounds), bounds.most)
    if (
        not any(trial.fits for trial in made.values())
        and own not in made
        and (bounds.most is None or own <= bounds.most)
    ):
        made[own] = trials(own, bounds)
    return made


def _bound(made: dict[int, Trial], bounds: Limits, fitting: int) -> str:
    """Why no batch larger than `fitting` counts."""
    beyond = min((size for size in made if size > fitting), default=None)
    if beyond is not None:
        return f"batch size {beyond:,}, where the trial {_ENDS[made[beyond].outcome]}"
    if not bounds.fixed and (bounds.most is None or fitting < on_grid(bounds.most)):
        return "time, as a step on more examples would take over 10 s"
    smallest = min(filter(None, bounds.known_mib), default=None)
    if fitting or smallest is None:
        return bounds.why
    return f"{bounds.why}, and a batch of {smallest} is estimated to take {figure(bounds.known_mib[smallest])} MiB"


def _known(value: float | None) -> str | None:
    return None if value is None else figure(value)
