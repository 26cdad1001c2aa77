"""What holds a pipeline back: threads and parallel calls that its stages share, and how fast each lets it go."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tfopt.pipelines.profiling.nodes import Node

HAND_OVER = ""  # stands for what is no stage's work
_MOSTLY_SEEN = 0.5


@dataclass(slots=True)
class Resource:
    """Something that the work of stages takes turns on.

    Args:
        capacity: Seconds of work that it can do in a second.
        seconds: Work an example, by stage.
    """

    capacity: float
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def rate(self, without: str | None = None) -> float:
        """Returns the examples a second that it lets pass; `without` leaves out a stage's work."""
        work = sum(seconds for stage, seconds in self.seconds.items() if stage != without)
        return self.capacity / work if work > 0 else math.inf


@dataclass(slots=True)
class Limits:
    """What holds a pipeline back.

    Args:
        pool: tf.data's thread pool.
        others: Threads, and calls of parallel nodes.
        calls: How many parallel calls an example takes, by stage.
        batch_size: Examples in a batch.
    """

    pool: Resource
    others: list[Resource] = field(default_factory=list)
    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    batch_size: float = 1.0

    def rate(self, without: str | None = None) -> float:
        """Returns the examples a second that all let pass; `without` leaves out a stage's work."""
        return min(resource.rate(without) for resource in (self.pool, *self.others))

    def busy_percent(self, stage: str, examples_per_second: float) -> float:
        """Returns the share of its own thread or parallel calls that a stage takes at this speed; at most 100."""
        shares = [own.seconds[stage] / own.capacity for own in self.others if stage in own.seconds]
        return min(100.0, 100 * examples_per_second * max(shares, default=0.0))

    def account_for(self, cpu_seconds: float, examples_per_second: float) -> None:
        """Counts as work the processor time that was not seen, where the work seen explains less than half of the time.

        TensorFlow does not time the starting of a call and the waking of its thread. With small elements that is most
        of the work, and it goes with the number of calls; handing a batch over counts as one.

        Args:
            cpu_seconds: Processor time that the process took, an example.
            examples_per_second: How fast the pipeline was.
        """
        unseen = cpu_seconds - sum(self.pool.seconds.values())
        if unseen <= 0 or self.rate() * _MOSTLY_SEEN < examples_per_second:
            return
        hand_over = 1 / self.batch_size
        total = sum(self.calls.values()) + hand_over
        for stage, calls in self.calls.items():
            self.pool.seconds[stage] += unseen * calls / total
        self.pool.seconds[HAND_OVER] += unseen * hand_over / total


def find_limits(
    root: Node, stages_of: Callable[[Node], dict[str, float]], *, batch_size: float, threads: float
) -> Limits:
    """Finds what the pipeline's stages share.

    - The calls of a parallel node: as many at once as its parallelism.
    - A thread: nodes that are not parallel work one after the other in that of the parallel node or prefetch behind
      them.
    - tf.data's thread pool, which runs the functions of all stages: one thread a core. A function that sleeps holds its
      thread as one that computes does, so stages hold each other back even where the processor is idle.

    Args:
        root: The nodes.
        stages_of: Gives the stages whose work a node does, each with its share; empty for none.
        batch_size: Examples in an element of `root`.
        threads: In the pool.
    """
    limits = Limits(Resource(threads), batch_size=batch_size)

    def resource(capacity: float) -> Resource:
        limits.others.append(Resource(capacity))
        return limits.others[-1]

    # From a node to its inputs: with the thread that asks it for elements, how many of those it gives for one of
    # the root's, and how many of its like there are side by side.
    def visit(node: Node, thread: Resource, given: float, copies: float) -> None:
        own = thread if node.parallelism is None else resource(node.parallelism * copies)
        for stage, share in stages_of(node).items():
            seconds = share * given * node.seconds / max(node.elements, 1) / batch_size
            own.seconds[stage] += seconds
            limits.pool.seconds[stage] += seconds
            limits.calls[stage] += share * given / batch_size if node.parallelism else 0.0
        starts_thread = node.parallelism is not None or node.name == "Prefetch"
        upstream = resource(copies) if starts_thread else thread
        for (slot, _), inner in node.inputs.items():
            if node.nests and slot > 0:
                visit(inner, own, given, own.capacity if node.parallelism else copies)
            else:
                visit(inner, upstream, given * _inputs_for_one(node, inner), copies)

    visit(root, resource(1.0), 1.0, 1.0)
    return limits


def _inputs_for_one(node: Node, inner: Node) -> float:
    if node.ratio is not None:
        return node.ratio
    return inner.elements / node.elements if node.elements else 1.0
