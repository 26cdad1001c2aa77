"""What a run says to do, against gains worked out by hand from step times."""

import re
import textwrap
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import keras
import numpy as np
import pytest

import tfopt
from tfopt.bench.report import page, terminal
from tfopt.bench.report.advice import advise
from tfopt.bench.results import CaseResult, Check, VariantResult
from tfopt.bench.results.run_file import read
from tfopt.measure import StepTimes

DEFAULTS, NAIVE, PIPELINE, CACHE, OVERLAP = (
    "Keras' defaults",
    "naive Keras",
    "+ build_pipeline",
    '+ cache="memory"',
    "+ overlap",
)
ON_A_GPU = {"+ TF32": 20.0, "+ mixed_bfloat16": 21.0, "+ XLA": 9.0}
CUT = read(Path(__file__).parents[3] / "benchmarks" / "results" / "stack-h100.json")


def variant(name, ms, passed=True, turns=6, techniques=()):
    times = StepTimes(repeats_ms=((ms, ms),) * turns, steps_per_sample=1, first_step_seconds=1.0, examples_per_step=32)
    check = None if passed is None else Check(what="", values=(), passed=passed, text="")
    return VariantResult(name=name, times=times, check=check, techniques=techniques)


@pytest.fixture
def stack(recorded_run):
    """A run whose suite `stack` took these times."""

    def made(first=(), *, left_out=(), unfinished=None, turns=6, passed=True, **changes):
        ms = {NAIVE: 24.0, DEFAULTS: 12.0, **dict(first), PIPELINE: 6.0, CACHE: 3.0, OVERLAP: 2.0} | changes
        added = [name.removeprefix("+ ") for name, value in ms.items() if value and name.startswith("+ ")]
        contents = dict(zip(added, accumulate((name,) for name in added), strict=True))
        variants = tuple(
            variant(name, value, passed, turns, contents.get(name.removeprefix("+ "), ()))
            for name, value in ms.items()
            if value and name not in left_out
        )
        fields = {"suite": "stack", "workload": "photos", "question": "?", "unit": "step of fit", "baseline": NAIVE}
        case = CaseResult(**fields, variants=variants, unfinished=unfinished).with_metrics()
        return replace(recorded_run, cases=(case,))

    return made


def test_the_lines_and_what_they_gain(stack):
    (found,) = advise(stack())
    assert found.summary == "The photos workload trains 6.00× [6.00–6.00] as fast as with Keras' defaults."
    assert found.code.splitlines() == [
        "import tfopt",
        "from tfopt.pipelines import build_pipeline",
        "",
        "# data: a folder of images or TFRecords, or a tuple of arrays",
        'dataset = build_pipeline(data, batch_size=32, cache="memory")  # 2.00×',
        "tfopt.fit.overlap(model)  # 1.50×",
        "model.fit(dataset)",
    ]
    assert "A factor of 2.00× comes from the cache in memory, where all examples of this workload fit." in found.notes
    assert "the gain is 12.0×" in found.notes
    assert found.notes.endswith("Read docs/pipelines.md, docs/fit.md.")


def test_what_slows_it_down_is_left_out(stack):
    (found,) = advise(stack(**{OVERLAP: 4.0}))
    assert found.summary.startswith("The photos workload trains 4.00×")
    assert "overlap" not in found.code
    assert "Left out, since it does not help here: overlap." in found.notes


def test_what_makes_no_difference_is_left_out(stack):
    (found,) = advise(stack(**{OVERLAP: 2.98}))  # the last one: the variant without it is advised
    assert found.summary.startswith("The photos workload trains 4.00×")
    assert "overlap" not in found.code
    assert "The factor was measured with" not in found.notes
    (found,) = advise(stack({"+ TF32": 24.0, "+ XLA": 23.9}))
    assert "set_jit" not in found.code
    assert "Left out, since they do not help here: TF32, XLA. The factor was measured with TF32, XLA." in found.notes


def test_16_bits_pay_with_the_kernels_on_top_of_them(stack):
    (found,) = advise(stack({"+ mixed_bfloat16": 25.0, "+ XLA": 9.0}))
    assert 'tfopt.precision.apply(model, "mixed_bfloat16")\n' in found.code
    assert "A line without one was measured together with the others." in found.notes


def test_what_changes_the_result_is_never_advised(stack):
    run = stack()
    (case,) = run.cases
    wrong = [variant(OVERLAP, 2.0, passed=False) if v.name == OVERLAP else v for v in case.variants]
    (found,) = advise(replace(run, cases=(replace(case, variants=tuple(wrong)).with_metrics(),)))
    assert "overlap" not in found.code + found.notes


def test_what_was_not_checked_is_never_advised(stack):
    (found,) = advise(stack(passed=None))
    assert found.summary == "photos: nothing is recommended, since the result of + overlap was not checked."
    assert not found.code


def test_too_few_turns_say_nothing(stack):
    (found,) = advise(stack(turns=2, unfinished="the budget ran out"))
    assert found.summary == "photos: nothing is recommended after so few turns."
    assert found.notes == "To measure the rest, run tfopt-bench again with --resume and the same --output."
    assert not found.code


def test_keras_defaults_may_be_best(stack):
    (found,) = advise(stack(**{DEFAULTS: 2.0}))
    assert found.summary == (
        "photos: keep Keras' defaults. Nothing measured here is shown to train faster (1.00× [1.00–1.00])."
    )
    assert not found.code


def test_on_a_gpu(stack):
    run = stack(ON_A_GPU, **{PIPELINE: 6.0, CACHE: None, OVERLAP: 5.0, "+ flash attention": 4.0})
    (found,) = advise(run)
    assert found.code.splitlines()[3:] == [
        "# data: a folder of images or TFRecords, or a tuple of arrays",
        'tfopt.precision.apply(model, "mixed_bfloat16")',
        "dataset = build_pipeline(data, batch_size=32)  # 1.50×",
        "tfopt.xla.set_jit(model, True)  # 2.33×",
        "tfopt.kernels.use_flash_attention(model)  # 1.25×",
        "tfopt.fit.overlap(model)  # 1.20×",
        "model.fit(dataset)",
    ]
    assert "docs/precision.md, docs/xla.md, docs/pipelines.md, docs/fit.md, docs/kernels.md." in found.notes


def test_a_run_cut_short_names_all_that_its_variant_contains_and_credits_no_part_of_it(stack):
    """As `stack-h100.json`, in which the last variant came first."""
    device = '+ cache="device"'
    rest = {CACHE: None, OVERLAP: 5.0, device: 2.0}
    cut = stack(ON_A_GPU, left_out=(*ON_A_GPU, PIPELINE, OVERLAP), unfinished="the budget ran out", **rest)
    (found,) = advise(cut)
    assert found.code.splitlines() == [
        "import tfopt",
        "from tfopt.pipelines import build_pipeline",
        "",
        "# data: a folder of images or TFRecords, or a tuple of arrays",
        'tfopt.precision.apply(model, "mixed_bfloat16")',
        'dataset = build_pipeline(data, batch_size=32, cache="device")',
        "tfopt.xla.set_jit(model, True)",
        "tfopt.fit.overlap(model)",
        "model.fit(dataset)",
    ]
    assert "comes from the cache" not in found.notes
    assert "measured together" in found.notes


def test_a_recorded_run_that_was_cut_short_recommends_nothing():
    (found,) = advise(CUT)
    assert (found.code, found.notes) == (
        "",
        "To measure the rest, run tfopt-bench again with --resume and the same --output.",
    )
    assert "was not checked" in found.summary
    text = " ".join(terminal(CUT).split())
    assert "faster" not in text.replace("Nothing was faster than", "").lower()
    assert "too few turns" in text
    (case,) = CUT.cases
    checked = tuple(replace(v, check=Check(what="", values=(), passed=True, text="")) for v in case.variants)
    (found,) = advise(replace(CUT, cases=(replace(case, variants=checked),)))
    assert "belongs to techniques that this file does not name" in found.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "changes"),
    [
        ({}, {}),
        ({"+ XLA": 9.0}, {PIPELINE: None, CACHE: None}),
        ({"+ TF32": 20.0, "+ mixed_bfloat16": 21.0, "+ XLA": 9.0}, {CACHE: None, "+ flash attention": 1.0}),
        ({"+ mixed_float16": 10.0}, {CACHE: None, '+ cache="device"': 1.0}),
    ],
)
def test_every_printed_block_runs_as_it_stands(stack, first, changes):
    """With the names that it says a script has: `model` and `data`."""
    text = terminal(stack(first, **changes))
    block = re.search(r"\n\n((?: {4}.*\n|\n)+)\n", text[text.index("Do this:") :])[1]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse")
    before = model.get_weights()
    data = np.ones((256, 4), "float32"), np.ones((256, 1), "float32")
    named = {"model": model, "data": data}
    exec(textwrap.dedent(block), named)
    if "fit(dataset)" in block:
        assert not np.array_equal(before[0], model.get_weights()[0])
    assert model.jit_compile == ("set_jit" in block)
    assert (tfopt.fit.launching.overlap_of(model) is not None) == ("overlap" in block)
    assert any("16" in layer.compute_dtype for layer in model.layers) == ("mixed" in block)


def test_without_defaults_beside_them_nothing_is_advised(stack, recorded_run):
    assert advise(stack(**{DEFAULTS: None})) == []
    assert advise(replace(recorded_run, cases=recorded_run.cases[1:])) == []


def steady(variant):
    """A variant without the pauses of the machine that it ran on, which leave nothing decided."""
    return replace(variant, times=replace(variant.times, repeats_ms=((variant.times.median_ms,),) * 6))


def test_a_run_recorded_before_variants_named_their_techniques(recorded_run):
    (case,) = (case for case in recorded_run.cases if case.suite == "stack")
    (found,) = advise(replace(recorded_run, cases=(replace(case, variants=tuple(map(steady, case.variants))),)))
    assert 'cache="memory"' in found.code
    assert "tfopt.fit.overlap(model)" in found.code


def test_a_run_ends_with_it_and_the_page_begins_with_it(stack):
    text = terminal(stack())
    assert "Do this: The photos workload trains 6.00×" in text
    assert text.index("Do this") > text.index("Faster") if "Faster" in text else True
    assert text.splitlines()[-1].endswith("docs/fit.md.")
    html = page(stack())
    assert html.index("Do this: photos") < html.index("What was found")
    assert "tfopt.fit.overlap(model)  # 1.50×" in html
