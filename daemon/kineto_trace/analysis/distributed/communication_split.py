"""What one rank's trace alone tells of its collectives: what is transfer at most, and what is waiting at least.

Theory of operation
    A collective is on the GPU while its rank waits for the others, and while data moves. One rank's trace does not tell
    the two apart. But collectives of one kind and size need the same time for the same data: the shortest one of them
    bounds the transfer of each from above, and what another one takes beyond that was waiting for another rank (or
    sharing links and multiprocessors with other work). Of fewer than LEAST_ALIKE collectives alike nothing is known.

    Not all of it can be gained. Where the rank had other work to do or its host was late, a shorter collective gains
    nothing. So the rank is simulated (rank_simulation.py): by what it is faster with collectives that only transfer, is
    what waiting costs; by what it then is faster with collectives that take no time, is what transfers cost, at most.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.distributed.rank_simulation import Simulation
from kineto_trace.analysis.distributed.rank_work import rank_work
from kineto_trace.arrays.intervals import Union, containing, difference, intersection, union
from kineto_trace.collectives.rank_clocks import RankCollectives
from kineto_trace.collectives.rank_matching import match, rank_collectives
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import KERNEL, gpu

Ints = npt.NDArray[np.int64]
LEAST_ALIKE = 3  # collectives of one kind and size


@dataclass(frozen=True, slots=True)
class CommunicationSplit:
    """Times of one rank's collectives on the GPU, within some stretches of time (ns).

    exposed: while the GPU computed nothing; of that, transfer: at most; waiting: at least; unknown: of collectives
    without others alike. waiting_gain: by how much the rank would be faster without waiting; transfer_gain: then
    without transfers (and unknown). longest: the longest wait.
    """

    total: int
    exposed: int
    transfer: int
    waiting: int
    unknown: int
    transfer_gain: int
    waiting_gain: int
    longest: int


def communication_split(context: Context, measured: Union) -> CommunicationSplit:
    """Splits the collectives of one trace as far as they lie in these stretches of time (Unix ns)."""
    activity, found = context.get(gpu), context.get(rank_collectives)
    counted = containing(*measured, found.end - 1) >= 0
    computes = (activity.kind == KERNEL) & ~activity.communication
    computing = union(activity.start[computes], activity.end[computes])
    collectives = union(activity.start[activity.communication], activity.end[activity.communication])
    total = intersection(collectives, measured)
    exposed = difference(total, computing)
    shortest, known = _shortest(found)
    begin = np.where(known, found.end - shortest, found.start)
    moving = intersection(exposed, union(begin[known], found.end[known]))
    unknown = difference(intersection(exposed, union(begin[~known], found.end[~known])), moving)
    waiting = intersection(exposed, union(found.start[known], begin[known]))
    waiting = difference(difference(waiting, moving), unknown)
    lost = _lost(context, found.end - begin, counted)
    return CommunicationSplit(
        total=total.length(),
        exposed=exposed.length(),
        transfer=moving.length(),
        waiting=waiting.length(),
        unknown=unknown.length(),
        transfer_gain=moving.length() + unknown.length() if lost is None else lost[1],
        waiting_gain=waiting.length() if lost is None else lost[0],
        longest=int((begin - found.start)[counted].max(initial=0)),
    )


def _shortest(found: RankCollectives) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For each collective the duration of the shortest one alike, and whether there are enough of them."""
    count = len(found.descriptions)
    shortest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(shortest, found.description, found.end - found.start)
    known = np.bincount(found.description, minlength=count) >= LEAST_ALIKE
    return shortest[found.description], known[found.description]


def _lost(context: Context, transfer: Ints, counted: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
    """What the rank loses (ns) by waiting, and then by transfers that take so long; None if it cannot be simulated.

    counted: collectives that may change; the others stay as they are.
    """
    try:
        simulation = context.get(_alone)
    except ViewError:
        return None
    if not len(simulation.rows):
        return None
    left, nothing = simulation.found.transfer.copy(), simulation.found.transfer.copy()
    left[simulation.matched.instance[counted]] = transfer[counted]
    nothing[simulation.matched.instance[counted]] = 0
    moving_only, without = (simulation.run(simulation.chains.before, each) for each in (left, nothing))
    return max(simulation.model_ns - moving_only, 0), max(moving_only - without, 0)


def _alone(context: Context) -> Simulation:
    """The rank as a job of its own: nobody else is known."""
    work = context.get(rank_work)
    return Simulation(match([(context.rank, work.found)]), [work], least=1)
