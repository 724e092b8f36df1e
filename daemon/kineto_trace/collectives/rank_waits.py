"""Who waits for whom in collectives, told by their durations; and who begins one last, told by clocks.

Theory of operation
    Durations: no clock matters.
    No rank can leave an all_reduce, all_gather, reduce_scatter, all_to_all or barrier before all others have entered
    it. So whoever is in it for the shortest time came last, and what the others are in it beyond that, they waited for
    that rank. Broadcasts, sends and the like let ranks go earlier: they do not count here.

    Clocks: a rank is the last one only if it begins later than the last but one by more than the clocks may be off. If
    nothing is known of the clocks, so that they are aligned by the ends of collectives, these tell how well: the doubt
    is by how much the ends of the same collective differ.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.collectives.rank_clocks import MEETINGS, TIMESTAMP_NS
from kineto_trace.collectives.rank_matching import Instances, Matched, instances, skew_uncertainty

NO_COLLECTIVES = (
    "the traces have no collectives: neither kernels of NCCL or RCCL (activity type kernel) nor operators such as "
    "gloo:all_reduce (activity type cpu_op)"
)

Ints = npt.NDArray[np.int64]


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


def missing_waits(matched: Matched, found: Waits) -> list[str]:
    """Returns why nothing is known of waiting, if it is so."""
    if len(found.row):
        return []
    shared = int((instances(matched).seen > 1).sum())
    if not len(matched):
        why = NO_COLLECTIVES
    elif not shared:
        why = "no collective appears on more than one rank"
    else:
        kinds = ", ".join(sorted({description.collective for description in matched.descriptions}))
        why = f"{shared} collectives appear on several ranks, but in none of them all ranks have to meet ({kinds})"
    return [f"{why}, so who waits for whom is unknown"]


@dataclass(frozen=True, slots=True)
class Lasts:
    """One value per matched collective. certain: whether the rank that began last is known to be it.

    margin: by how much (ns) it began later than the last but one. caused: for how long the others waited for it alone:
    the margin, or what they waited at most if that is less; 0 if it is not certain.
    """

    certain: npt.NDArray[np.bool_]
    margin: Ints
    caused: Ints


def lasts(matched: Matched, found: Instances) -> Lasts:
    """Returns by how much the last rank of each collective is behind the others."""
    if not len(matched):
        nothing = np.empty(0, np.int64)
        return Lasts(nothing.astype(np.bool_), nothing, nothing)
    rest = np.ones(len(matched), np.bool_)
    rest[found.row] = False
    rest &= found.seen[matched.instance] > 1
    before = found.last_start.copy()
    np.minimum.at(before, matched.instance[rest], found.start[matched.instance[rest]])
    np.maximum.at(before, matched.instance[rest], matched.start[rest])
    waited = np.zeros(len(found.seen), np.int64)
    duration = matched.end - matched.start
    np.maximum.at(waited, matched.instance[rest], (duration - found.transfer[matched.instance])[rest])
    margin = found.last_start - before
    doubt = skew_uncertainty(matched)
    doubt = np.where(np.isnan(doubt), found.end - found.first_end + 2.0 * TIMESTAMP_NS, doubt)
    certain = (found.seen > 1) & (margin > doubt)
    return Lasts(certain, margin, np.where(certain, np.minimum(margin, waited), 0))
