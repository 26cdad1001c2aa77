"""Communication of replicas: what was measured, and a stated model that predicts a step on more of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

FORMULA = "compute + 2 (n - 1) latency + 2 (n - 1) / n · bytes / bandwidth"
_PREDICTED_REPLICAS = (8, 64)


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
            compute_ms: The step on one replica.
            gradient_bytes: Of all gradients together.
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
class Communication:
    """What the replicas of a case send each other and how soon they train."""

    replicas: int
    sent_bytes_per_step: float | None  # by each, as counted; None where nothing counts them
    model: RingModel
    start_to_first_step_seconds: Mapping[str, float]  # by variant

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
