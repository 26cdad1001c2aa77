"""The key of a cache follows what its examples are computed by, whatever else changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import changes
import pytest
from quick import first_quick


@pytest.fixture
def key_of(tmp_path):
    """Returns the key of a program's cache, planned as the pipeline of its own file."""
    yield lambda program, **options: changes.key(changes.made(program, tmp_path), **options)
    changes.settings_restored()


@pytest.mark.parametrize("name", first_quick(changes.SEEN, 4))
def test_a_change_that_may_change_the_result_gives_another_key(key_of, name):
    program, old, new = changes.SEEN[name]
    assert old in program
    assert key_of(program) != key_of(program.replace(old, new))


@pytest.mark.parametrize("name", first_quick(changes.ALIKE, 2))
def test_a_change_that_keeps_the_graph_keeps_the_key(key_of, name):
    program, old, new = changes.ALIKE[name]
    assert old in program
    assert key_of(program) == key_of(program.replace(old, new))


@pytest.mark.parametrize("name", first_quick(changes.REFUSED, 2))
def test_what_a_graph_does_not_show_wants_a_cache_key(key_of, name):
    program, found = changes.REFUSED[name], name.split()[-1]
    with pytest.raises(ValueError, match=rf"'transform' holds .*{found}.* would go unnoticed.*cache_key="):
        key_of(program)
    first, again, other = (key_of(program, cache_key=given) for given in "aab")
    assert first == again != other
    assert key_of(program.replace("def f(x): return", "def f(x): return -x,"), cache_key="a") != first


@pytest.mark.slow
def test_another_process_finds_the_same_keys(key_of):
    """With other hashes of texts, and the programs in another order."""
    here = {}
    for name, (program, *_) in changes.ACROSS.items():
        here[name] = key_of(program)
        changes.settings_restored()
    output = subprocess.run(
        [sys.executable, changes.__file__],
        cwd=Path(changes.__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(output.stdout.splitlines()[-1]) == here
