"""Which trace of a baseline each trace is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

from kineto_trace.open.trace_discovery import Source

from kinetoctl.errors import NotFound

NO_COMMON_RANK = "the two jobs have no rank in common"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineTraces:
    """The traces to compare with; none: nothing is compared. rank: the only one, with which every trace is compared."""

    sources: Sequence[Source] = ()
    rank: int | None = None

    def pairs(self, others: Sequence[Source]) -> list[tuple[Source, Source]]:
        """The trace of the baseline for each of these that it has one for: of the same rank, or the only one.

        Two traces are compared whatever their ranks. Raises NotFound.
        """
        if self.rank is not None or len(self.sources) == len(others) == 1:
            return [(self.sources[0], other) for other in others]
        known = {source.rank: source for source in self.sources}
        found = [(known[other.rank], other) for other in others if other.rank in known]
        if not found:
            raise NotFound(NO_COMMON_RANK)
        return found


def of_rank(sources: Sequence[Source], rank: int | None, *, baseline: bool = False) -> list[Source]:
    """The traces of this rank; all of them for None. Raises NotFound."""
    chosen = [source for source in sources if rank is None or source.rank == rank]
    if not chosen:
        known = ", ".join(str(each.rank) for each in sources)
        whose = " in the baseline" if baseline else ""
        raise NotFound(f"there is no trace of rank {rank}{whose}; there are: {known}")
    return chosen
