"""The snippets of docs/precision.md run as they stand, one after the other."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("precision.md", tmp_path)
    for shown in (
        "bfloat16 float32\n",
        "Changed 1 layer to mixed_float16; the loss is scaled.",
        "mixed_float16 does not pass: 1 problem.\n- 'loud' overflows, the first layer to do so: 100 % of its output",
        "Passes instead: net: mixed_float16, loud: float32, quiet: float32",
        "  head, outputs, 8 (bfloat16)\n    50,257  50,264  +0.0139 %   95.9 %     50,304\n",
        "Multiples of 16 bytes, but not of 128, at which A100 and later are best: 4.",
    ):
        assert shown in printed
