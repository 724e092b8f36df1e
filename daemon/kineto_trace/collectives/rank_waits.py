"""Who waits for whom in collectives, told by their durations alone: no clock matters.

Theory of operation
    No rank can leave an all_reduce, all_gather, reduce_scatter, all_to_all or barrier before all others have entered
    it. So whoever is in it for the shortest time came last, and what the others are in it beyond that, they waited for
    that rank. Broadcasts, sends and the like let ranks go earlier: they do not count here.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.collectives.rank_clocks import BLOCKING
from kineto_trace.collectives.rank_matching import Instances, Matched, instances

Ints = npt.NDArray[np.int64]
MEETINGS = BLOCKING | {"all_to_all"}


@dataclass(frozen=True, slots=True)
class Waits:
    """One value per rank and collective that several ranks have: rows of `Matched`.

    ns: how long the rank waited. culprit: place in `Matched.ranks` of the one that came last.
    """

    row: Ints
    ns: Ints
    culprit: Ints


def waits(matched: Matched, found: Instances | None = None) -> Waits:
    """Returns the waiting of all ranks in collectives that synchronize them."""
    found = instances(matched) if found is None else found
    if not len(matched):
        return Waits(*np.empty((3, 0), np.int64))
    duration = matched.end - matched.start
    beyond = duration - found.transfer[matched.instance]
    shortest = np.zeros(len(found.seen), np.int64)
    least = np.flatnonzero(beyond == 0)[::-1]  # of equal ones the first rank
    shortest[matched.instance[least]] = matched.rank[least]
    meets = np.array([description.collective in MEETINGS for description in matched.descriptions], np.bool_)
    row = np.flatnonzero(meets[matched.description] & (found.seen[matched.instance] > 1))
    return Waits(row, beyond[row], shortest[matched.instance[row]])
