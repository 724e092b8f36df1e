"""What a job whose collectives run on the host (gloo, MPI) could gain at most.

Theory of operation
    The traces say when each collective ran, on a thread of its own, but not when the thread that trains waited for it:
    so what a rank works beside its collectives is unknown, and the job cannot be simulated. Durations still bound what
    it could gain. In a collective in which all ranks meet, everybody waits for the rank that came last. Had that one
    come together with the last but one, the collective would have been over earlier by the shortest wait of the others,
    at most. Had its transfer taken no time, by the transfer. What overlaps counts once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.intervals import union
from kineto_trace.collectives.rank_matching import Instances, Matched
from kineto_trace.collectives.rank_waits import waits

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBounds:
    """Per matched collective (ns). last: place in `Matched.ranks` of the rank that came last; NOBODY: unknown.

    end: when it was over. transfer: of the collectives that several ranks have, else 0. late: how much earlier it would
    have been over, had that rank come with the last but one. measured_ns: from the first of them to the end of the last
    one.
    """

    last: Ints
    end: Ints
    transfer: Ints
    late: Ints
    measured_ns: int

    def of_rank(self, place: int) -> int:
        """Returns what the job would gain at most if a rank never came last."""
        own = self.last == place
        over = (self.end - self.transfer)[own]
        return union(over - self.late[own], over).length()

    def of_transfers(self, chosen: npt.NDArray[np.bool_]) -> int:
        """Returns what the job would gain at most if these transfers took no time."""
        return union((self.end - self.transfer)[chosen], self.end[chosen]).length()


NOBODY = -1


def host_bounds(matched: Matched, found: Instances) -> HostBounds:
    """Returns the bounds of a job."""
    count, shared, never = len(found.seen), found.seen > 1, np.iinfo(np.int64).max
    waited = waits(matched, found)
    last, late = np.full(count, NOBODY), np.full(count, never)
    last[matched.instance[waited.row]] = waited.culprit
    others = matched.rank[waited.row] != waited.culprit
    np.minimum.at(late, matched.instance[waited.row[others]], waited.ns[others])
    measured = int(found.end[shared].max() - found.start[shared].min()) if shared.any() else 0
    return HostBounds(last, found.end, np.where(shared, found.transfer, 0), np.where(late == never, 0, late), measured)
