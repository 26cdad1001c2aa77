"""What a run says to do, against gains worked out by hand from step times."""

from dataclasses import replace

import pytest

from tfopt.bench.report import page, terminal
from tfopt.bench.report.advice import advise
from tfopt.bench.results import CaseResult, Check, VariantResult
from tfopt.measure import StepTimes

DEFAULTS, NAIVE, PIPELINE, CACHE, OVERLAP = (
    "Keras' defaults",
    "naive Keras",
    "+ build_pipeline",
    '+ cache="memory"',
    "+ overlap",
)


def variant(name, ms, passed=True):
    times = StepTimes(repeats_ms=((ms, ms),) * 6, steps_per_sample=1, first_step_seconds=1.0, examples_per_step=32)
    return VariantResult(name=name, times=times, check=Check(what="", values=(), passed=passed, text=""))


@pytest.fixture
def stack(recorded_run):
    """A run whose suite `stack` took these times."""

    def made(first=(), **changes):
        ms = {NAIVE: 24.0, DEFAULTS: 12.0, **dict(first), PIPELINE: 6.0, CACHE: 3.0, OVERLAP: 2.0} | changes
        variants = tuple(variant(name, value) for name, value in ms.items() if value)
        fields = {"suite": "stack", "workload": "photos", "question": "?", "unit": "step of fit", "baseline": NAIVE}
        return replace(recorded_run, cases=(CaseResult(**fields, variants=variants).with_metrics(),))

    return made


def test_the_lines_and_what_they_gain(stack):
    (found,) = advise(stack())
    assert found.summary == "The photos workload trains 6.00× [6.00–6.00] as fast as with Keras' defaults."
    assert found.code.splitlines() == [
        "import tfopt",
        "from tfopt.pipelines import build_pipeline",
        "",
        'source = "path/to/data"  # images or TFRecords; or a tuple of arrays',
        'dataset = build_pipeline(source, batch_size=32, cache="memory")  # 2.00×',
        "tfopt.fit.overlap(model)  # 1.50×",
        "model.fit(dataset)",
    ]
    compile(found.code, "pasted", "exec")
    assert "..." not in found.code
    assert "A factor of 2.00× comes from the cache in memory, where all examples of this workload fit." in found.notes
    assert "the gain is 12.0×" in found.notes
    assert found.notes.endswith("Read docs/pipelines.md, docs/fit.md.")


def test_what_slows_it_down_is_left_out(stack):
    (found,) = advise(stack(**{OVERLAP: 4.0}))
    assert found.summary.startswith("The photos workload trains 4.00×")
    assert "overlap" not in found.code
    assert "Left out, since it does not help here: overlap." in found.notes


def test_what_changes_the_result_is_never_advised(stack):
    run = stack()
    (case,) = run.cases
    wrong = [variant(OVERLAP, 2.0, passed=False) if v.name == OVERLAP else v for v in case.variants]
    (found,) = advise(replace(run, cases=(replace(case, variants=tuple(wrong)).with_metrics(),)))
    assert "overlap" not in found.code + found.notes


def test_keras_defaults_may_be_best(stack):
    (found,) = advise(stack(**{DEFAULTS: 2.0}))
    assert found.summary == (
        "photos: keep Keras' defaults. Nothing measured here is shown to train faster (1.00× [1.00–1.00])."
    )
    assert not found.code


def test_on_a_gpu(stack):
    tensor_cores = {"+ TF32": 20.0, "+ mixed_bfloat16": 18.0, "+ XLA": 9.0}
    run = stack(tensor_cores, **{PIPELINE: 6.0, CACHE: None, OVERLAP: 5.0, "+ flash attention": 4.0})
    (found,) = advise(run)
    assert found.code.splitlines()[3:] == [
        'tfopt.precision.set_policy("mixed_bfloat16")  # 1.11×',
        'source = "path/to/data"  # images or TFRecords; or a tuple of arrays',
        "dataset = build_pipeline(source, batch_size=32)  # 1.50×",
        "tfopt.xla.set_jit(model, True)  # 2.00×",
        "tfopt.kernels.use_flash_attention(model)  # 1.25×",
        "tfopt.fit.overlap(model)  # 1.20×",
        "model.fit(dataset)",
    ]
    assert "docs/precision.md, docs/xla.md, docs/pipelines.md, docs/fit.md, docs/kernels.md." in found.notes


def test_without_defaults_beside_them_nothing_is_advised(stack, recorded_run):
    assert advise(stack(**{DEFAULTS: None})) == []
    assert advise(replace(recorded_run, cases=recorded_run.cases[1:])) == []


def test_a_run_ends_with_it_and_the_page_begins_with_it(stack):
    text = terminal(stack())
    assert "Do this: The photos workload trains 6.00×" in text
    assert text.index("Do this") > text.index("Faster") if "Faster" in text else True
    assert text.splitlines()[-1].endswith("docs/fit.md.")
    html = page(stack())
    assert html.index("Do this: photos") < html.index("What was found")
    assert "tfopt.fit.overlap(model)  # 1.50×" in html
