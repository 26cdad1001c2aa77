"""benchmarks/packing.py: that each way trains on the same tokens, and that docs/text.md says what was recorded."""

import json
import re
from pathlib import Path

import numpy as np
import packing
import pytest

ROOT = Path(packing.__file__).parents[1]
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "packing-cpu.json").read_text(encoding="utf-8"))


def test_what_was_recorded_is_what_the_page_says():
    found = RECORDED["figures"]
    low, high = found[packing.PACKED]["interval"]
    said = " ".join((ROOT / "docs" / "text.md").read_text(encoding="utf-8").split())
    assert f"{found[packing.PACKED]['speed']:.1f} times as many tokens a second ({low:.1f}–{high:.1f})" in said
    for name in ("bucket=True", 'pad="batch"'):
        assert re.search(rf"{found[name]['speed']:.1f} times (as many )?with `{name}`", said)
    assert found[packing.PACKED]["speed"] >= 2  # the goal
    alone = RECORDED["alone"]
    ours = alone[packing.PACKED]["tokens_per_second"]
    assert f"{ours / 1e6:.1f} million tokens a second: {alone[packing.PACKED]['speed']:.1f} times" in said
    for name in ("PyTorch", "Grain"):
        assert f"{ours / alone[name]['tokens_per_second']:.1f} times as many as {name}" in said


def test_speed_is_of_tokens_in_the_time_of_an_epoch():
    for one in RECORDED["figures"].values():
        assert one["tokens_per_second"] == pytest.approx(1e3 * one["tokens"] / np.median(one["epoch_ms"]))
        assert one["speed"] == pytest.approx(
            np.median(np.array(RECORDED["figures"][packing.BASELINE]["epoch_ms"]) / one["epoch_ms"])
        )


def test_rows_by_hand_are_packed_as_ours():
    rows = list(packing.rows_by_hand([[1, 2, 3], [4, 5]]))
    ((inputs, labels, weights),) = rows
    order = [1, 2, 3, 4, 5] if inputs["tokens"][0] == 1 else [4, 5, 1, 2, 3]
    assert inputs["tokens"][:6].tolist() == [*order, 0]
    assert inputs["segments"][:6].tolist() == ([1, 1, 1, 2, 2, 0] if order[0] == 1 else [1, 1, 2, 2, 2, 0])
    assert labels[:5].tolist() == ([2, 3, 0, 5, 0] if order[0] == 1 else [5, 0, 2, 3, 0])
    assert weights[:5].tolist() == ([1, 1, 0, 1, 0] if order[0] == 1 else [1, 0, 1, 1, 0])


@pytest.mark.slow
def test_batches_alone_hold_every_token():
    texts = packing.documents(40)
    found = packing.measure_batches(texts, 1)
    assert {"generator by hand", packing.PACKED} <= set(found)
    assert {one["tokens"] for one in found.values()} == {sum(map(len, texts)) - len(texts)}


@pytest.mark.slow
def test_every_way_trains_on_every_token():
    texts = packing.documents(40)
    found = packing.measure_training(texts, 1)
    assert list(found) == list(RECORDED["figures"])
    assert {one["tokens"] for one in found.values()} == {sum(map(len, texts)) - len(texts)}
