"""`fit` in two processes: data that would be left out or trained on twice is refused; all else trains as before."""

import json

import pytest
from data_check_cases import COMPARED, FEW, HEALTHY, SHOWN, WRONG
from quick import in_shares
from trained_apart import ended, start

# Those that say something of data that may be healthy.
WARNED = {"sharded, endless, steps": "shard(2, 0) in worker 0", "files of unlike sizes, batches mapped": "Found: 52"}


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What a share of the cases came to in each of two processes."""
    folder = tmp_path_factory.mktemp(request.param)
    ended(start("data_check_job.py", folder, request.param, workers=2))
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(2)]


def shared(names):
    """Parameters for the share and each of these cases."""
    rows = in_shares([(name,) for name in names], lambda name: name in FEW)
    return pytest.mark.parametrize(("found", "name"), rows, indirect=["found"], scope="module")


@shared(WRONG)
def test_wrong_data_is_refused_by_name_in_all_workers(found, name):
    refused, other = (each["checked"][name]["refused"] for each in found)
    assert refused == other
    assert WRONG[name][1] in refused
    assert refused.startswith("Expected ")
    assert "What to do: " in refused


@shared(SHOWN)
def test_without_the_check_some_examples_are_never_seen(found, name):
    one, other = (each["without"][name]["seen"] for each in found)
    epoch = [*one[: len(one) // 2], *other[: len(other) // 2]]  # of two
    assert len(set(epoch)) < 64


@shared(HEALTHY)
def test_healthy_data_is_not_refused(found, name):
    one, other = (each["checked"][name] for each in found)
    assert one["weights"] == other["weights"]
    warned = " ".join(one["warned"])
    assert WARNED[name] in warned if name in WARNED else not warned


@shared(COMPARED)
def test_the_check_changes_neither_weights_nor_examples(found, name):
    for each in found:
        assert each["checked"][name] == {**each["without"][name], "warned": []}
