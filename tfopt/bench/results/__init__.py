"""Values of a benchmark run: a run has cases, a case has variants. `results.run_file` reads and writes them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from tfopt.measure import Comparison, StepTimes, compare

UNDER_WAY = "under way when this was written"
"""Why a case is unfinished whose run goes on, or was killed."""

FORMULA = "compute + 2 (n - 1) latency + 2 (n - 1) / n · bytes / bandwidth"
"""Of `RingModel.step_ms`, for n replicas."""

NAIVE, DEFAULTS = "naive Keras", "Keras' defaults"
"""Names of the variants of the suite `stack` against which techniques are measured."""


NEVER_BEGAN = "it never began"
"""Why a case is unfinished that the run did not get to."""

_PREDICTED_REPLICAS = (8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether a variant computes what the baseline computes."""

    what: str  # was compared
    values: tuple[float, ...]  # an accuracy for each training run, or how many values differ
    passed: bool
    text: str  # for the table


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConditions:
    """State of the GPUs during a variant's turns, without the first turn, in which it compiles."""

    sm_clock_mhz: tuple[float, float] | None = None  # lowest and median
    gpu_temperature_celsius: float | None = None  # highest
    gpu_power_watts: float | None = None  # of all its GPUs, by their energy counters; None for turns too short to tell
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What the device reaches at best, measured in the same run."""

    matmul_tflops: Mapping[str, float]  # by dtype
    copy_gib_per_second: float  # read and written on the device, together
    host_to_device_gib_per_second: float | None  # from pageable memory; None without a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What follows from a variant's samples and readings."""

    interval_ms: tuple[float, float] | None
    comparison: Comparison | None  # with the baseline; None for the baseline itself
    verdict: str
    of_ceiling: Comparison | None = None
    mfu_percent: float | None = None
    joules_per_thousand_examples: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """One way to train, as far as it was measured."""

    name: str
    note: str = ""  # what it is, in a few words
    techniques: tuple[str, ...] = ()  # of the suite `stack` that it contains; none in runs recorded before
    recommended: bool = False  # by tfopt for this device
    ceiling: bool = False  # what the other variants can reach at most
    dtype: str | None = None  # of its matrix products
    refused: str | None = None  # why it cannot run here
    check: Check | None = None
    peak_memory_mib: float | None = None
    conditions: GpuConditions | None = None
    times: StepTimes | None = None  # None before its first turn
    metrics: Metrics | None = None

    @property
    def turns(self) -> int:
        """Number of turns measured."""
        return len(self.times.repeats_ms) if self.times else 0

    @property
    def verdict(self) -> str | None:
        """What its figures say; None before its first turn."""
        return self.metrics.verdict if self.metrics else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingModel:
    """A step on n replicas that add up their gradients in a ring after it, with nothing at the same time.

    Each replica sends 2 (n - 1) messages of 1 / n of the gradients. All links count as equal to the measured one, which
    is optimistic for a network between machines; transfer hidden behind computation is ignored, which is pessimistic.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """

    compute_ms: float  # the step on one replica
    gradient_bytes: int  # of all gradients together
    latency_ms: float  # of one message
    mib_per_second: float  # bandwidth of the link from a replica to the next

    @classmethod
    def measured(
        cls, *, compute_ms: float, gradient_bytes: int, replicas: int, reduction_ms: Mapping[int, float]
    ) -> Self:
        """Derives latency and bandwidth from the times of two all-reduces over the replicas.

        Args:
            compute_ms, gradient_bytes: As of the model.
            replicas: At least two.
            reduction_ms: Time of an all-reduce by the tensor's size in bytes, for a small and a large tensor; under 0
                the time of the call alone.
        """
        (_, call_ms), (small, small_ms), (large, large_ms) = sorted(reduction_ms.items())
        sent_bytes = 2 * (replicas - 1) / replicas * (large - small)
        # Below what the clock can tell, the link counts as infinitely fast and a message as instant.
        seconds = max(large_ms - small_ms, 1e-3) / 1000
        return cls(
            compute_ms=compute_ms,
            gradient_bytes=gradient_bytes,
            latency_ms=max(small_ms - call_ms, 1e-3) / (2 * (replicas - 1)),
            mib_per_second=sent_bytes / 2**20 / seconds,
        )

    def sent_bytes(self, replicas: int) -> float:
        """Bytes each replica sends per step."""
        return 2 * (replicas - 1) / replicas * self.gradient_bytes

    def step_ms(self, replicas: int) -> float:
        """Time of a step."""
        transfer_ms = self.sent_bytes(replicas) / 2**20 / self.mib_per_second * 1000
        return self.compute_ms + 2 * (replicas - 1) * self.latency_ms + transfer_ms

    def efficiency(self, replicas: int) -> float:
        """Share of linear scaling."""
        return self.compute_ms / self.step_ms(replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step on some number of replicas, by the model."""

    replicas: int
    step_ms: float
    efficiency: float  # share of linear scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationResult:
    """What the replicas of a case send each other and how soon they train."""

    replicas: int
    sent_bytes_per_step: float | None  # by each, as counted; None where nothing counts them
    model: RingModel
    start_to_first_step_seconds: Mapping[str, float]  # by variant
    sharding: Mapping[str, float] | None = None  # `Sharding.to_dict()`, and `measured_sent_bytes` per update

    @property
    def expected_bytes_per_step(self) -> float:
        """Bytes each replica sends per step by the model's size."""
        return self.model.sent_bytes(self.replicas)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Predictions for the measured number of replicas, as a test of the model, and for more."""
        counts = (self.replicas, *_PREDICTED_REPLICAS)
        model = self.model
        return tuple(Prediction(replicas=n, step_ms=model.step_ms(n), efficiency=model.efficiency(n)) for n in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A question and what was measured to answer it."""

    suite: str
    workload: str
    question: str
    unit: str  # what one sample times
    baseline: str
    planned_turns: int | None = None  # None in runs recorded before turns were
    limit: str | None = None  # the ceiling that counts: the slowest
    operations_per_example: int | None = None
    ceilings: DeviceRates | None = None
    variants: tuple[VariantResult, ...] = ()
    profile: dict[str, Any] | None = None  # `PipelineProfile.to_dict()`
    gate: tuple[dict[str, Any], ...] | None = None  # `PrecisionReport.to_dict()` for each policy
    communication: CommunicationResult | None = None
    others_cpu_percent: float | None = None  # of the CPUs' time during the turns, taken by other programs
    unfinished: str | None = None  # why turns or checks are missing
    error: str | None = None  # why the case failed

    @property
    def address(self) -> tuple[str, str]:
        """Suite and workload, which name a case."""
        return self.suite, self.workload

    @property
    def done(self) -> bool:
        """Whether nothing is left to measure."""
        return self.error is None and self.unfinished is None

    @property
    def turns(self) -> int:
        """Number of turns measured, of all variants together."""
        return sum(variant.turns for variant in self.variants)

    @property
    def measured(self) -> tuple[VariantResult, ...]:
        """Variants that have figures."""
        return tuple(variant for variant in self.variants if variant.metrics is not None)

    def times(self, name: str) -> StepTimes | None:
        """Times of a variant; None if it has none yet.

        Raises:
            KeyError: If the case has no such variant.
        """
        return {variant.name: variant.times for variant in self.variants}[name]

    def with_metrics(self) -> "CaseResult":
        """Returns the case with the figures that follow from its samples."""
        ceilings = {v.name: v.times.median_ms for v in self.variants if v.ceiling and v.times}
        case = replace(self, limit=max(ceilings, key=ceilings.__getitem__, default=None))
        return replace(case, variants=tuple(replace(v, metrics=metrics(v, case)) for v in case.variants))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of `tfopt-bench`."""

    started: str  # ISO 8601
    status: str = "running"  # or "complete", "interrupted", "out of budget"
    suites: tuple[str, ...]
    small: bool = False  # whether sizes are those for a machine without a GPU
    environment: dict[str, Any]  # `tfopt.measure.environment()`
    resumed: tuple[str, ...] = ()  # how the environment differed when the run was resumed
    cases: tuple[CaseResult, ...] = ()

    @property
    def done(self) -> bool:
        """Whether nothing is left to measure."""
        return self.status == "complete" and all(case.done for case in self.cases)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of its GPUs."""
        return tuple(gpu["name"] for gpu in self.environment["gpus"])

    def case(self, address: tuple[str, str]) -> CaseResult | None:
        """The case of that suite and workload."""
        return next((case for case in self.cases if case.address == address), None)


def metrics(variant: VariantResult, case: CaseResult) -> Metrics | None:
    """Returns the figures of one variant; None before its first turn.

    A variant is compared with its case's baseline, and with the ceiling that `case.limit` names.
    """
    own = variant.times
    if own is None:
        return None
    before = None if variant.name == case.baseline else case.times(case.baseline)
    comparison = compare(before, own) if before else None
    limit = None if case.limit is None or variant.ceiling else case.times(case.limit)
    return Metrics(
        interval_ms=own.interval_ms,
        comparison=comparison,
        verdict=verdict(variant, case, comparison),
        of_ceiling=compare(limit, own) if limit else None,
        mfu_percent=_mfu_percent(variant, case, own),
        joules_per_thousand_examples=_joules_per_thousand_examples(variant, own),
    )


def verdict(variant: VariantResult, case: CaseResult, comparison: Comparison | None) -> str:
    """Returns what to make of a variant that was compared with the case's baseline."""
    if variant.check is not None and not variant.check.passed:
        return "changes the result"
    if variant.name == case.baseline:
        return "baseline"
    return "not compared" if comparison is None else comparison.verdict


def _mfu_percent(variant: VariantResult, case: CaseResult, times: StepTimes) -> float | None:
    """Model FLOPs utilisation: the model's operations over those of a large matrix product in the same time.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B, where the denominator
    is the listed peak.
    """
    operations, rates = case.operations_per_example, case.ceilings
    if operations is None or rates is None or variant.dtype is None or times.examples_per_second is None:
        return None
    return float(100 * operations * times.examples_per_second / (rates.matmul_tflops[variant.dtype] * 1e12))


def _joules_per_thousand_examples(variant: VariantResult, times: StepTimes) -> float | None:
    watts = variant.conditions.gpu_power_watts if variant.conditions else None
    if watts is None or times.examples_per_second is None:
        return None
    return float(watts * 1000 / times.examples_per_second)
