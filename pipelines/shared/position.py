"""Where a pipeline begins among the iterations of its dataset, and what its stages leave out for that."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """What the stages leave out so that their dataset begins with a later iteration.

    What draws anew in each iteration does so when the iteration is begun, or, inside a nested dataset, when it is read.
    """

    opened: int = 0  # draws of what draws when an iteration is begun
    reshuffled: int = 0  # draws of a shuffle that is nested, since the first iteration goes without it
    examples: int = 0  # of the first iteration, left out where the order is decided
    late: int = 0  # further ones, left out before they are batched
    batches: int = 0  # both together
    # Of a part of a mixture, whose examples an iteration may read several times; 0 outside of mixtures.
    times: int = 0
    count: int = 0  # examples of each reading, if there are several

    @property
    def whole(self) -> int:
        """Readings that are left out as a whole."""
        return self.examples // self.count if self.count else 0

    @property
    def rest(self) -> int:
        """Examples of the next reading that are left out."""
        return self.examples - self.whole * self.count


FIRST = Turn()
"""Of a dataset that begins at its start."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the iterations of a dataset that begins at its start."""

    epoch: int = 0  # iterations that were read before
    batch: int = 0  # batches that were read of the next one
    opened: int = 0  # iterations that were begun before, read or not

    def turns(self, size: int, chunk: int = 1) -> tuple[Turn, Turn]:
        """Returns what the iteration in which this lies leaves out, and what all later ones do.

        Args:
            size: Examples in a batch.
            chunk: Examples that functions take at once. No chunk is cut, since kernels may round otherwise in another.
        """
        # The first iteration that was begun is among those read, and took no draw of the nested shuffle.
        reshuffled = max(self.epoch - 1, 0) if self.opened else 0
        late = self.batch * size % chunk
        first = Turn(self.opened, reshuffled, self.batch * size - late, late, self.batch)
        return first, Turn(self.opened, reshuffled + (self.opened > 0))

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch}"


START = Position()
