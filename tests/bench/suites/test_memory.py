"""The suite `memory`: what each way takes, and that a wrong result is noticed."""

from dataclasses import replace

import pytest

from tfopt.bench.cases import CPU, GPU, training
from tfopt.bench.cases.measuring import measure
from tfopt.bench.suites import memory
from tfopt.kernels import explain

TINY = {"blocks": 3, "width": 32, "heads": 2, "vocabulary": 2048, "length": 64}


def test_losses_must_agree_and_memory_is_shown():
    (case,) = memory.cases(CPU)
    check = case.judge([80.0, 5.0, 4.0], [51.4, 5.001, 4.001])
    assert (check.passed, check.text) == (True, "51 MiB")
    assert not case.judge([80.0, 5.0, 4.0], [51.4, 5.0, 4.1]).passed


def test_on_a_gpu_it_is_gpt_2_itself(monkeypatch):
    made = []
    monkeypatch.setattr(training.gpt2, "model", lambda **options: made.append(options) or "net")
    monkeypatch.setattr(training.kernels, "use_flash_attention", made.append)
    monkeypatch.setattr(memory, "StepTimer", lambda net, batch: made.append(batch[0].shape) or print)
    (case,) = memory.cases(GPU)
    assert case.workload == "gpt2"
    case.variants[0].timer(None)
    assert made == [{"jit_compile": True}, "net", (16, 1024)]


@pytest.mark.slow
def test_each_way_takes_less_and_trains_the_same(monkeypatch):
    monkeypatch.setattr(training, "_SMALL", replace(training._SMALL, sizes=TINY))
    (case,) = memory.cases(CPU)
    in_pieces = case.variants[-1].values.args[1]
    assert "chunked cross-entropy" in [row.kernel for row in explain(training._SMALL.net(in_pieces)).layers]
    outcome = measure(replace(case, repeats=1))
    assert [variant.check.passed for variant in outcome.variants] == [True] * 4
    mib = [variant.check.values[0] for variant in outcome.variants]
    assert max(mib[1:]) < 0.95 * mib[0]
