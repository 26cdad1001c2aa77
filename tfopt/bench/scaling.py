"""What a step would take on more devices than there are: a stated model, whose inputs are measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

FORMULA = "compute + 2 (n - 1) latency + 2 (n - 1) / n · bytes / bandwidth"
PREDICTED_REPLICAS = (8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingModel:
    """A step on n replicas whose gradients are added up in a ring after it, with nothing at the same time.

    Each replica sends 2 (n - 1) messages of a part of 1 / n of the gradients. All links are taken to be like the
    measured one, which is optimistic where a network between machines takes its place, and transfer that hides behind
    computation is left out, which is pessimistic. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms
    for clusters of workstations, 2009.

    Attributes:
        compute_ms: The step on one replica.
        gradient_bytes: Of all gradients together.
        latency_ms: Of one message.
        mib_per_second: Bandwidth of the link from a replica to the next.
    """

    compute_ms: float
    gradient_bytes: int
    latency_ms: float
    mib_per_second: float

    @classmethod
    def measured(
        cls, *, compute_ms: float, gradient_bytes: int, replicas: int, reduction_ms: Mapping[int, float]
    ) -> Self:
        """The model whose latency and bandwidth follow from the times of two all-reduces over the replicas there are.

        Args:
            compute_ms: The step on one replica.
            gradient_bytes: Of all gradients together.
            replicas: At least two.
            reduction_ms: The time to add up a small and a large tensor, by their size in bytes; under 0 that of the
                call alone, which adds up nothing.
        """
        (_, call_ms), (small, small_ms), (large, large_ms) = sorted(reduction_ms.items())
        sent_bytes = 2 * (replicas - 1) / replicas * (large - small)
        # Below what the clock tells apart, the link is as good as infinitely fast, and a message takes no time.
        seconds = max(large_ms - small_ms, 1e-3) / 1000
        return cls(
            compute_ms=compute_ms,
            gradient_bytes=gradient_bytes,
            latency_ms=max(small_ms - call_ms, 1e-3) / (2 * (replicas - 1)),
            mib_per_second=sent_bytes / 2**20 / seconds,
        )

    def sent_bytes(self, replicas: int) -> float:
        """What each replica sends in a step."""
        return 2 * (replicas - 1) / replicas * self.gradient_bytes

    def step_ms(self, replicas: int) -> float:
        """The time of a step."""
        transfer_ms = self.sent_bytes(replicas) / 2**20 / self.mib_per_second * 1000
        return self.compute_ms + 2 * (replicas - 1) * self.latency_ms + transfer_ms

    def efficiency(self, replicas: int) -> float:
        """The share of `replicas` times one replica's speed."""
        return self.compute_ms / self.step_ms(replicas)

    def predictions(self, replicas: int) -> list[dict[str, Any]]:
        """JSON: step time and efficiency, for as many replicas as were measured, as a test of the model, and for more.

        Args:
            replicas: How many were measured.
        """
        return [
            {"replicas": each, "step_ms": self.step_ms(each), "efficiency": self.efficiency(each)}
            for each in (replicas, *PREDICTED_REPLICAS)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The inputs as JSON values."""
        return asdict(self)
