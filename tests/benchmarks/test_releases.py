import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD_AGAIN = "Record each pair again: python benchmarks/releases.py benchmarks/results/releases.json"
PAIRS = json.loads((ROOT / "benchmarks/results/releases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def releases():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("releases")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("pair", PAIRS)
def test_every_function_of_a_pair_is_known(releases, pair):
    states = {one.name: releases.state(one, PAIRS[pair]) for one in releases.EVERY}
    assert {name: state for name, state in states.items() if state == "unknown"} == {}, RECORD_AGAIN


@pytest.mark.parametrize("pair", PAIRS)
def test_every_name_of_a_pair_is_there(releases, pair):
    assert set(releases.private_names()) - set(PAIRS[pair]["names"]) == set(), RECORD_AGAIN


def test_the_installed_pair_is_recorded_as_it_is(releases):
    found = releases.recorded()
    if (pair := releases.installed_pair()) not in PAIRS:
        pytest.skip(f"{pair} is not recorded")
    assert {name: PAIRS[pair][name] for name in found} == found, RECORD_AGAIN


def test_the_table_is_in_the_docs(releases):
    assert releases.table(PAIRS) in (ROOT / "docs/versions.md").read_text(encoding="utf-8")
