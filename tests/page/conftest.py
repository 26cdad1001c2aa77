import pytest

from tfopt.page import Bar, Page, Section, Table, bar_chart


def precision() -> Section:
    chart = bar_chart(
        [
            Bar("float32", 1.0, "1.00×", tone="baseline"),
            Bar("float32 with TF32", 1.42, "1.42× (1.38–1.47)", 1.38, 1.47, "better"),
            Bar("mixed_bfloat16", 2.31, "2.31× (2.24–2.37)", 2.24, 2.37, "better"),
            Bar("mixed_float16, fused batch norm", 2.18, "2.18× (1.61–2.66)", 1.61, 2.66, "better"),
            Bar("mixed_float16, stock Keras", 0.87, "0.87× (0.84–0.91)", 0.84, 0.91, "worse"),
        ],
        title="Speed of a training step, by precision",
        description="Times as fast as float32, median of interleaved blocks. The whisker is the 95\u00a0% interval.",
        reference=1.0,
        reference_label="1×, as fast as float32",
    )
    table = Table(
        ["Policy", "Step", "Examples/s", "Memory", "Largest drift", "Verdict"],
        [
            ["float32", "38.2 ms", "6,702", "11,204 MiB", "–", "baseline"],
            ["float32 with TF32", "26.9 ms", "9,517", "11,204 MiB", "0.04 %", "faster, within tolerance"],
            ["mixed_bfloat16", "16.5 ms", "15,481", "6,310 MiB", "0.31 %", "faster, within tolerance"],
            ["mixed_float16, fused batch norm", "17.5 ms", "14,610", "6,322 MiB", "0.12 %", "faster, within tolerance"],
            ["mixed_float16, stock Keras", "43.9 ms", "5,831", "6,402 MiB", "0.12 %", "slower"],
        ],
        align="lrrrrl",
    )
    samples = Table(
        ["Block", "float32", "mixed_bfloat16"],
        [["a", "38.1 ms", "16.5 ms"], ["b", "38.4 ms", "16.4 ms"], ["c", "38.2 ms", "16.9 ms"]],
        align="lrr",
        caption="One sample is a block of 20 steps",
    )
    text = (
        "bfloat16 halves the step and needs no loss scaling. Drift stays below the tolerance of 1\u00a0%.\n\n"
        "float16 gains as much, but only with the fused batch normalisation: stock Keras computes it in float32 and "
        "copies every activation twice."
    )
    return Section("Precision", text, [chart], [table], [("Raw samples", samples)])


def xla() -> Section:
    chart = bar_chart(
        [
            Bar("ResNet-50, jit off", 1.0, "1.00×", tone="baseline"),
            Bar("ResNet-50, jit on", 1.19, "1.19× (1.15–1.22)", 1.15, 1.22, "better"),
            Bar("Transformer, jit on", 1.02, "1.02× (0.97–1.06)", 0.97, 1.06, "unclear"),
        ],
        title="Speed with XLA",
        description="Compilation is counted apart.",
        reference=1.0,
        reference_label="1×, without XLA",
    )
    log = "compile 0: 14.2 s, train_step\ncompile 1: 3.1 s, test_step\nno recompilation after step 2"
    return Section("XLA", "It pays for itself after 2,410 steps.", [chart], details=[("Compilations", log)])


def pipeline() -> Section:
    chart = bar_chart(
        [
            Bar("as written", 1.0, "1.00×", tone="baseline"),
            Bar("parallel decode", 7.6, "7.60× (7.31–7.92)", 7.31, 7.92, "better"),
            Bar("parallel decode, cached on NVMe", 31.4, "31.4× (28.0–36.2)", 28.0, 36.2, "better"),
            Bar("cached in memory, preprocessing on the GPU", 80.0, "80.0× (77.5–81.9)", 77.5, 81.9, "better"),
            Bar("cached on network storage", 0.01, "0.01× (0.008–0.02)", 0.008, 0.02, "worse"),
        ],
        title="Elements per second from the pipeline alone",
        description="Against the pipeline as it was written.",
        reference=1.0,
        reference_label="1×, as written",
    )
    return Section("Input pipeline", "Decoding limits it: 71 % of the time goes there.", [chart])


def callbacks() -> Section:
    chart = bar_chart(
        [
            Bar("no callback", 38.2, "38.2 ms", tone="baseline"),
            Bar("ThroughputLogger", 38.3, "38.3 ms (38.1–38.6)", 38.1, 38.6, "unclear"),
            Bar("UtilizationLogger", 38.4, "38.4 ms (38.2–38.5)", 38.2, 38.5, "unclear"),
            Bar("print of the loss every step", 42.4, "42.4 ms (42.0–43.1)", 42.0, 43.1, "worse"),
        ],
        title="Time of a step with a callback",
        description="Shorter is better.",
    )
    environment = Table(
        ["Item", "Value"],
        [
            ["Device", "NVIDIA H200, 143,771 MiB, compute capability 9.0"],
            ["Driver", "570.86.15"],
            ["TensorFlow", "2.21.0"],
            ["Keras", "3.15.1"],
            ["CPU", "16 cores, cgroup limit 12"],
            ["XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=4"],
        ],
        caption="Environment",
    )
    return Section("Callbacks", "Watching costs nothing that could be measured.", [chart], [environment])


@pytest.fixture
def sample_page() -> Page:
    return Page(
        title="ResNet-50 on one H200",
        lead="Mixed precision with bfloat16 trains 2.31 times as fast as float32 and computes the same thing within "
        "the stated tolerance. Without a faster input pipeline none of it would be felt.",
        sections=[precision(), xla(), pipeline(), callbacks()],
        footer="tfopt-bench, run 7c1e, 412 s. Every figure was measured on the machine named above.",
    )
