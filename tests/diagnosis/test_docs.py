"""docs/diagnosis.md names every cause that is tested, and its snippets run as they stand."""

import re

import pytest
from snippets import ROOT, run_snippets

from tfopt.causes import catalogue
from tfopt.causes.catalogue import Cause

PAGE = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")

# By an alert, or by a diagnosis as "noticed".
READ = {
    cause.name
    for cause in (
        catalogue.CPU_QUOTA,
        catalogue.CPUS_SHARED,
        catalogue.FAR_CPUS,
        catalogue.MIG_INSTANCE,
        catalogue.OTHER_PROCESS,
        catalogue.PCIE_LINK,
        catalogue.SHORT_KERNELS,
        catalogue.FLOAT32_PRODUCT,
        catalogue.SIZES,
    )
}


def test_every_cause_has_a_row():
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.M))
    in_time = {cause.name for cause in vars(catalogue).values() if isinstance(cause, Cause)} - {
        *READ,
        "callback",
        catalogue.FULL_MEMORY.name,
    }
    assert len(in_time) >= 18
    assert in_time - {"between epochs"} | {"callback …", "callback …, between epochs"} == rows


def test_what_is_read_is_on_the_page():
    for name in READ:
        assert f"`{name}`" in PAGE, name


def test_links_lead_to_headings():
    for page, heading in re.findall(r"\]\(([\w.]*)(?:#([^)]+))?\)", PAGE):
        text = (ROOT / "docs" / (page or "diagnosis.md")).read_text(encoding="utf-8")
        headings = [
            re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
            for line in re.findall("^#+ (.*)", text, re.M)
        ]
        assert not heading or heading in headings, heading


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("diagnosis.md", tmp_path)
    assert "the computation" in printed
    assert re.search(r"^(A step is now|Nothing was changed)", printed, re.M)
