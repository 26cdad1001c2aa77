"""README and docs/: every snippet runs together with those of its page, and every name of tfopt in them exists."""

import re

import pytest
from snippets import FIRST, NOT_RUN, PAGES, ROOT, exists, run_snippets, snippets_of, text_of, unresolved

WITH_SNIPPETS = [page for page in PAGES if snippets_of(page)]


def test_every_page_with_snippets_is_run_by_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(WITH_SNIPPETS) > 20
    assert [page for page in WITH_SNIPPETS if f'run_snippets("{page}", ' not in tests] == []


@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_snippets_compile_and_their_names_exist(page):
    assert [unresolved(snippet) for snippet in snippets_of(page)] == [[] for _ in snippets_of(page)]


def test_what_is_not_run_is_in_one_place():
    for part in [*NOT_RUN, *FIRST]:
        assert sum(part in snippet for page in PAGES for snippet in snippets_of(page)) == 1, part


def test_python_is_marked_as_such():
    """Or it would not be run."""
    for page in PAGES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.S | re.M)
        unmarked = [block for language, block in blocks if not language.startswith("py")]
        assert not [
            block
            for block in unmarked
            if re.search(r"^(import \w|from \S+ import |with .*:$|model\.\w+\()", block, re.M)
        ], page
        assert not re.search(r"^ +```py", text_of(page), re.M), page


def test_names_in_the_prose_exist():
    names = {name for page in PAGES for name in re.findall(r"(?<![\w./-])tfopt(?:\.\w+)+", text_of(page))}
    assert len(names) > 60
    assert sorted(name for name in names if not exists(name)) == []


@pytest.mark.slow
def test_the_snippets_of_measure_run(tmp_path):
    assert run_snippets("measure.md", tmp_path).count("ms") >= 2


@pytest.mark.slow
def test_the_snippets_of_xla_run(tmp_path):
    assert "xla_gpu_enable_cublaslt" in run_snippets("xla.md", tmp_path)
