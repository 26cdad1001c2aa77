import ast
from pathlib import Path

from tfopt.measure import StepTimes
from tfopt.text import Shown, aligned, described, figure, listed, readable_bytes, wrapped

ROOT = Path(__file__).parent.parent
# Parts of results, or what no verb returns.
PARTS = {
    "PrecisionMonitor",
    "Alert",
    "BatchShapes",
    "Compilation",
    "CpuBinding",
    "Gpu",
    "Host",
    "LayerPath",
    "Miss",
    "Obstacle",
    "Pad",
    "Remark",
    "VisibleDevices",
}


def test_of_many_names_the_first_ones():
    assert listed([], 2) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(("a", "b", "c", "d"), 2) == "a, b and 2 more"


def test_texts_start_together_and_figures_end_together():
    rows = [("layer", "class", "error", "lost"), ("a", "Dense", "12 %", "0 %"), ("longer", "B", "1.25 %", "")]
    assert aligned(rows, texts=2) == [
        "  layer   class   error  lost",
        "  a       Dense    12 %   0 %",
        "  longer  B      1.25 %",
    ]
    long = 60 * "x"
    assert aligned([*rows, (long, "Dense", "3 %", "")], texts=2) == [
        "  layer, class",
        "     error  lost",
        "  a, Dense",
        "      12 %   0 %",
        "  longer, B",
        "    1.25 %",
        f"  {long}, Dense",
        "       3 %",
    ]


def test_sentences_are_wrapped_beside_their_names():
    rows = [
        ("read", "arrays", "in a random order, by position"),
        ("cache", "a/folder/of/thirty/characters", ""),
        ("x", "", "y"),
    ]
    assert described(rows, width=30) == [
        "  read   arrays  in a random",
        "                 order, by",
        "                 position",
        "  cache  a/folder/of/thirty/characters",
        "  x              y",
    ]


def test_prose_is_wrapped_between_words_and_what_is_pasted_is_not():
    text = "Found no-such-extra in it.\n- a problem of layers\n    model.compile(optimizer)\n\nRun: pip install 'tfopt'"
    assert wrapped(text, width=14).splitlines() == [
        "Found",
        "no-such-extra",
        "in it.",
        "- a problem of",
        "  layers",
        "    model.compile(optimizer)",
        "",
        "Run:",
        "pip install 'tfopt'",
    ]
    assert wrapped("tfopt-bench run --resume --output results", width=20) == "tfopt-bench run --resume --output results"


def test_sizes_are_readable():
    sizes = (3, 2048, 1.5 * 2**20, 2**31)
    assert [readable_bytes(size) for size in sizes] == ["3 B", "2.0 KiB", "1.5 MiB", "2.0 GiB"]


class Result(Shown):
    def __str__(self):
        return "2 < 3\nand more"


def test_a_result_is_a_line_in_a_console_and_a_text_in_a_notebook():
    assert repr(Result()) == "<Result: 2 < 3>"
    assert Result()._repr_html_() == "<pre>2 &lt; 3\nand more</pre>"
    times = StepTimes(repeats_ms=(tuple(map(float, range(1, 2000))),), steps_per_sample=1, first_step_seconds=1)
    assert repr(times) == f"<StepTimes: {times}>"


def test_every_result_that_reads_as_text_is_shown_so():
    """A dataclass would make a repr of its own."""
    found = set()
    for folder in ("tfopt", "callbacks", "pipelines"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or "bench" in path.parts:
                    continue
                names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                if {"to_dict", "__str__"} <= names and node.name not in PARTS:
                    found.add(node.name)
                    assert "Shown" in {ast.unparse(base) for base in node.bases}, (path, node.name)
                    assert all("repr=False" in ast.unparse(one) for one in node.decorator_list), (path, node.name)
    assert {"PrecisionReport", "Explanation", "JitDecision", "PipelineProfile", "Compilations"} <= found


def test_figures_have_three_digits_or_all_before_the_point():
    values = (0.0, 0.01234, 1.5, 99.96, 123.4, 12345.6, 2e6, -0.91726, -12345.6, -1e-5)
    texts = ["0", "0.0123", "1.5", "100", "123", "12,346", "2e+06", "−0.917", "−12,346", "−1e-05"]
    assert [figure(value) for value in values] == texts
