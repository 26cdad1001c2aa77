"""benchmarks/packing.py: that each way trains on the same tokens, and that docs/text.md says what was recorded."""

import json
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
        assert f"`{name}` {found[name]['speed']:.1f} " in said
    assert found[packing.PACKED]["speed"] >= 2  # the goal


def test_speed_is_of_tokens_in_the_time_of_an_epoch():
    for one in RECORDED["figures"].values():
        assert one["tokens_per_second"] == pytest.approx(1e3 * one["tokens"] / np.median(one["epoch_ms"]))
        assert one["speed"] == pytest.approx(
            np.median(np.array(RECORDED["figures"][packing.BASELINE]["epoch_ms"]) / one["epoch_ms"])
        )


@pytest.mark.slow
def test_every_way_trains_on_every_token():
    texts = packing.documents(40)
    found = packing.measure(texts, 1)
    assert list(found) == list(RECORDED["figures"])
    assert {one["tokens"] for one in found.values()} == {sum(map(len, texts)) - len(texts)}
