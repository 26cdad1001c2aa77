"""A folder of recorded runs as one document: Markdown with pictures, for a repository, and an HTML page."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt.bench import columns, peers, report, results, words
from tfopt.errors import ResultsError
from tfopt.page import Bar, Page, Section, Table, bar_chart, picture, render

MARK = "<!-- Written by `tfopt-bench report`: not to be edited by hand. -->"
_HOW = (
    "Each part is a recorded run: its variants were measured in turn. The ratios within a run count; times of unlike "
    "machines do not compare. Speed is the baseline's time over the variant's, with a 95 % interval."
)
_NO_GPU = "No run on a GPU is recorded yet: `tfopt-bench run gpu`, on a machine that has one, makes it."


@dataclass(frozen=True, slots=True)
class Collection:
    """Recorded runs.

    Attributes:
        runs: Results documents by the name of their file, those on a GPU first.
        peers: Lines of other frameworks' scripts.
    """

    runs: dict[str, dict[str, Any]]
    peers: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Collection":
        """Reads what tfopt-bench and the peers' scripts wrote in a folder; JSON files of other kinds are left out.

        Raises:
            tfopt.errors.ResultsError: There is no run, or one is not whole.
        """
        by_schema: dict[str, list[Path]] = {}
        for path in sorted(Path(folder).glob("*.json")):
            by_schema.setdefault(_schema(path), []).append(path)
        runs = {path.name: results.read(path) for path in by_schema.get(results.SCHEMA, [])}
        if not runs:
            raise ResultsError(f"Expected results of tfopt-bench in {folder}. Found none. Run `tfopt-bench run` first.")
        with_gpu_first = sorted(runs.items(), key=lambda item: not item[1]["environment"]["gpus"])
        lines = [line for path in by_schema.get(peers.SCHEMA, []) for line in peers.read(path)]
        return cls(dict(with_gpu_first), lines)

    @property
    def on_gpu(self) -> bool:
        """Whether any run was made on a GPU."""
        return any(document["environment"]["gpus"] for document in self.runs.values())

    def beside(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """The peers' lines that were measured on a run's GPU."""
        return peers.on([gpu["name"] for gpu in document["environment"]["gpus"]], self.peers)


def pictures(collection: Collection) -> dict[str, str]:
    """The charts of the suite `stack` as SVG documents, by the name of their file."""
    return {
        _picture_name(name, case): picture(
            _bars(case, collection.beside(document)),
            title=_chart_title(case),
            description=_measured_on(document),
            reference=1.0,
        )
        for name, document in collection.runs.items()
        for case in document["cases"]
        if _is_stack(case)
    }


def markdown(collection: Collection, pictures_at: str) -> str:
    """The document as GitHub's Markdown.

    Args:
        collection: The runs.
        pictures_at: The pictures' folder, relative to the document.
    """
    lines = ["# Benchmarks", "", MARK, "", _HOW]
    if not collection.on_gpu:
        lines += ["", _NO_GPU]
    for name, document in collection.runs.items():
        lines += ["", f"## {name}", "", f"{_measured_on(document)}, {_when(document)}. {words.lead(document)}"]
        for case in document["cases"]:
            lines += ["", f"### {case['suite']}: {case['workload']}", "", case["question"]]
            if case["error"]:
                lines += ["", f"This case failed: {case['error']}"]
                continue
            if _is_stack(case):
                lines += ["", f"![{_chart_title(case)}]({pictures_at}/{_picture_name(name, case)})"]
            lines += ["", *_markdown_table(columns.table(case))]
            for sentence in words.sentences(case):
                lines += ["", sentence]
        if beside := collection.beside(document):
            lines += ["", "### Beside it", "", *_markdown_table(peers.table(beside))]
    return "\n".join(lines) + "\n"


def page(collection: Collection) -> str:
    """The document as a self-contained HTML page.

    Raises:
        tfopt.errors.UnsupportedError: jinja2 is not installed.
    """
    sections = []
    for name, document in collection.runs.items():
        sections.append(
            Section(title=name, text=f"{_measured_on(document)}, {_when(document)}. {words.lead(document)}")
        )
        sections += [report.section(case) for case in document["cases"]]
        if beside := collection.beside(document):
            charts = [
                bar_chart(
                    _bars(case, beside),
                    title=_chart_title(case),
                    description="The peers ran beside the run, not in turns with its variants.",
                    reference=1.0,
                    reference_label=f"as fast as {case['baseline']}",
                )
                for case in document["cases"]
                if _is_stack(case)
            ]
            sections.append(Section(title="Beside it", charts=charts, tables=[peers.table(beside)]))
    lead = _HOW if collection.on_gpu else f"{_HOW}\n\n{_NO_GPU.replace('`', '')}"
    return render(Page(title="Benchmarks", lead=lead, sections=sections))


def _schema(path: Path) -> str:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"Expected JSON files in the folder. Found in {path}: {error}. Remove the file.") from error
    return str(document.get("schema")) if isinstance(document, dict) else ""


def _is_stack(case: dict[str, Any]) -> bool:
    return case["suite"] == "stack" and case["error"] is None


def _bars(case: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[Bar]:
    return columns.bars(case) + peers.bars(case, lines)


def _chart_title(case: dict[str, Any]) -> str:
    return f"{case['workload']}: times as fast as {case['baseline']}"


def _measured_on(document: dict[str, Any]) -> str:
    return f"Measured on {words.device(document)}"


def _when(document: dict[str, Any]) -> str:
    cut = "" if document["status"] == "complete" else f"; cut short: {document['status']}"
    return f"tfopt {document['environment']['tfopt']}, on {document['started'][:10]}{cut}"


def _picture_name(run: str, case: dict[str, Any]) -> str:
    words_ = re.sub(r"[^a-z0-9]+", "-", f"{case['suite']} {case['workload']}".lower()).strip("-")
    return f"{Path(run).stem}-{words_}.svg"


def _markdown_table(table: Table) -> list[str]:
    rules = ["---:" if letter == "r" else "---" for letter in table.alignment]
    return [f"| {' | '.join(cells)} |" for cells in (table.headers, rules, *table.rows)]
