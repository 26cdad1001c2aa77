"""A folder of recorded runs as one document: Markdown with pictures, for a repository, and an HTML page.

Other frameworks' measurements on the same GPU, which scripts in `benchmarks/peers` print, stand beside the runs.
"""

import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt.bench import report
from tfopt.bench.report import formatting
from tfopt.bench.report.formatting import number
from tfopt.bench.results import CaseResult, Run, run_file
from tfopt.errors import ResultsError
from tfopt.page import Bar, Page, Section, Table, bar_chart, picture, render

MARK = "<!-- Written by `tfopt-bench report`: not to be edited by hand. -->"
PEERS_SCHEMA = "tfopt-peers"
PEERS_SCHEMA_VERSION = 1

_HOW = (
    "Each part is a recorded run: its variants were measured in turn. Ratios within a run count; times of different "
    "machines do not compare. Speed is the baseline's time over the variant's, with a 95 % interval."
)
_NO_GPU = "No run on a GPU is recorded yet: `tfopt-bench run gpu`, on a machine that has one, makes it."
_STRINGS = ("workload", "variant", "device", "torch")

PeerLine = dict[str, Any]
"""A line of JSON that a peer's script prints for a variant."""


@dataclass(frozen=True, slots=True)
class Collection:
    """Recorded runs."""

    runs: dict[str, Run]  # by the name of their file, those on a GPU first
    peers: list[PeerLine]
    skipped: tuple[str, ...] = ()  # why each file that is damaged or not JSON was left out

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Collection":
        """Reads what tfopt-bench and the peers' scripts wrote in a folder.

        Other JSON documents are ignored.

        Raises:
            tfopt.errors.ResultsError: If there is no run.
        """
        runs: dict[str, Run] = {}
        lines: list[PeerLine] = []
        skipped: list[str] = []
        for path in sorted(Path(folder).glob("*.json")):
            try:
                schema = _schema(path)
                if schema == run_file.SCHEMA:
                    runs[path.name] = run_file.read(path)
                elif schema == PEERS_SCHEMA:
                    lines += read_peers(path)
            except ResultsError as error:
                skipped.append(f"skipped {str(path)!r}: {error}")
        if not runs:
            found = " ".join(["Found none.", *(f"{reason[0].upper()}{reason[1:]}" for reason in skipped)])
            raise ResultsError(
                f"Expected results of tfopt-bench in {str(folder)!r}. {found} Run `tfopt-bench run` first."
            )
        with_gpu_first = sorted(runs.items(), key=lambda item: not item[1].gpus)
        return cls(dict(with_gpu_first), lines, tuple(skipped))

    @property
    def on_gpu(self) -> bool:
        """Whether any run was made on a GPU."""
        return any(run.gpus for run in self.runs.values())

    def beside(self, run: Run) -> list[PeerLine]:
        """The peers' lines that were measured on a run's GPU."""
        return [line for line in self.peers if line["device"] in run.gpus]


def pictures(collection: Collection) -> dict[str, str]:
    """Returns the charts of the suite `stack` as SVG documents, by the name of their file."""
    return {
        _picture_name(name, case): picture(
            _bars(case, collection.beside(run)),
            title=_chart_title(case),
            description=_measured_on(run),
            reference=1.0,
        )
        for name, run in collection.runs.items()
        for case in run.cases
        if _is_stack(case)
    }


def markdown(collection: Collection, pictures_at: str) -> str:
    """Returns the document as GitHub's Markdown, with links to its pictures in the folder `pictures_at`, beside it."""
    lines = ["# Benchmarks", "", MARK, "", _HOW]
    if not collection.on_gpu:
        lines += ["", _NO_GPU]
    for name, run in collection.runs.items():
        lines += ["", f"## {name}", "", _introduction(run)]
        for case in run.cases:
            lines += ["", f"### {case.suite}: {case.workload}", "", case.question]
            if case.error:
                lines += ["", f"This case failed: {case.error}"]
            if case.unfinished:
                lines += ["", f"This case is unfinished: {case.unfinished}."]
            if not case.variants:
                continue
            if _is_stack(case):
                lines += ["", f"![{_chart_title(case)}]({pictures_at}/{_picture_name(name, case)})"]
            lines += ["", *_markdown_table(formatting.table(case))]
            for sentence in formatting.sentences(case):
                lines += ["", sentence]
        if beside := collection.beside(run):
            lines += ["", "### Beside it", "", *_markdown_table(peers_table(beside))]
    return "\n".join(lines) + "\n"


def page(collection: Collection) -> str:
    """Returns the document as a self-contained HTML page.

    Raises:
        tfopt.errors.UnsupportedError: If jinja2 is not installed.
    """
    sections = []
    for name, run in collection.runs.items():
        sections.append(Section(title=name, text=_introduction(run)))
        sections += map(report.section, run.cases)
        if beside := collection.beside(run):
            charts = [
                bar_chart(
                    _bars(case, beside),
                    title=_chart_title(case),
                    description="The peers ran beside the run, not in turns with its variants.",
                    reference=1.0,
                    reference_label=f"as fast as {case.baseline}",
                )
                for case in run.cases
                if _is_stack(case)
            ]
            sections.append(Section(title="Beside it", charts=charts, tables=[peers_table(beside)]))
    every = [case for run in collection.runs.values() for case in run.cases]
    how = " ".join(filter(None, (_HOW, formatting.legend(every))))
    lead = how if collection.on_gpu else f"{how}\n\n{_NO_GPU.replace('`', '')}"
    return formatting.unbroken(render(Page(title="Benchmarks", lead=lead, sections=sections)))


def _schema(path: Path) -> str:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = "a folder" if path.is_dir() else f"truncated or not JSON ({error})"
        raise ResultsError(f"Expected a JSON file. Found that it is {found}. Move it elsewhere.") from error
    return str(document.get("schema")) if isinstance(document, dict) else ""


def _is_stack(case: CaseResult) -> bool:
    return case.suite == "stack" and bool(formatting.bars(case))


def _bars(case: CaseResult, lines: Sequence[PeerLine]) -> list[Bar]:
    return formatting.bars(case) + peers_bars(case, lines)


def _chart_title(case: CaseResult) -> str:
    return f"{case.workload}: times as fast as {case.baseline}"


def _measured_on(run: Run) -> str:
    return f"Measured on {formatting.device(run)}"


def _introduction(run: Run) -> str:
    cut = "" if run.status == "complete" else f"; cut short: {run.status}"
    when = f"tfopt {run.environment['tfopt']}, on {run.started[:10]}{cut}"
    return f"{_measured_on(run)}, {when}. {formatting.lead(run)}"


def _picture_name(run: str, case: CaseResult) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", f"{case.suite} {case.workload}".lower()).strip("-")
    return f"{Path(run).stem}-{slug}.svg"


def _markdown_table(table: Table) -> list[str]:
    rules = ["---:" if letter == "r" else "---" for letter in table.alignment]
    return [f"| {' | '.join(cells)} |" for cells in (table.headers, rules, *table.rows)]


def peers_document(lines: Sequence[PeerLine]) -> dict[str, Any]:
    """Returns the document, as JSON values, of the lines that the scripts in `benchmarks/peers` printed."""
    return {"schema": PEERS_SCHEMA, "schema_version": PEERS_SCHEMA_VERSION, "lines": list(lines)}


def read_peers(path: str | os.PathLike[str]) -> list[PeerLine]:
    """Reads the lines of such a document.

    Raises:
        tfopt.errors.ResultsError: If the file is no such document, or not whole.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if (found["schema"], found["schema_version"]) != (PEERS_SCHEMA, PEERS_SCHEMA_VERSION):
            raise ValueError(f"the schema {found['schema']!r}, {found['schema_version']!r}")
        for line in found["lines"]:
            if not all(isinstance(line[name], str) for name in _STRINGS) or not min(line["samples_ms"]) > 0:
                raise ValueError(f"a line {line!r}")
            _ = line["batch_size"], line["peak_memory_mib"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"Expected a document of peers, schema version {PEERS_SCHEMA_VERSION}. Found in {path}: {error!r}. Run the "
            "scripts again."
        ) from error
    lines: list[PeerLine] = found["lines"]
    return lines


def peers_table(lines: Sequence[PeerLine]) -> Table:
    """A row for each variant; blocks before and after a run are taken together."""
    rows = [
        (
            f"{workload}, {variant}",
            number(ms),
            number(1000 * line["batch_size"] / ms),
            "" if line["peak_memory_mib"] is None else f"{line['peak_memory_mib']:,.0f}",
            f"torch {line['torch']}",
        )
        for workload, variant, ms, line in _medians(lines)
    ]
    headers = ("PyTorch", "ms a step", "Examples a second", "Peak MiB", "Version")
    return Table(headers, rows, align="lrrrl")


def peers_bars(case: CaseResult, lines: Sequence[PeerLine]) -> list[Bar]:
    """Bars for the peers of a case with the same batch size, as long as they are fast against its baseline."""
    baseline = case.times(case.baseline)
    if baseline is None:
        return []
    wanted = (case.workload, baseline.examples_per_step)
    same = [line for line in lines if (line["workload"], line["batch_size"]) == wanted]
    speeds = [(variant, baseline.median_ms / ms) for _, variant, ms, _ in _medians(same)]
    return [Bar(f"PyTorch, {variant}", ratio, f"{number(ratio)}×") for variant, ratio in speeds]


def _medians(lines: Sequence[PeerLine]) -> Iterator[tuple[str, str, float, PeerLine]]:
    for workload, variant in dict.fromkeys((line["workload"], line["variant"]) for line in lines):
        same = [line for line in lines if (line["workload"], line["variant"]) == (workload, variant)]
        yield workload, variant, statistics.median(ms for line in same for ms in line["samples_ms"]), same[0]
