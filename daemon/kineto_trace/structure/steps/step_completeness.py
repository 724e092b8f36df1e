"""Which training steps were recorded from their beginning to their end.

Theory of operation
    A step that the recording cut off says nothing of how long a step takes, so that no mean may count it.

    Captures of kinetod state it: a step that had begun before the window, or had not ended in it, has the argument
    "complete": false (decode/iterations.py), and what was running at the end is not `finished`. Stored traces of
    earlier versions state when each step began, in `TargetInfo.iterations`.

    torch.profiler writes a step when it ends, and ends the last one itself when it stops. If the program leaves its
    loop before the schedule's last step, that one is a rest: it holds little more than the end of the loop. The file
    does not tell it from a whole step, but its work does: it is taken to be incomplete if it holds far fewer operators
    and calls than any other step. Where the others hold little themselves, nothing is concluded.
"""

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import containing
from kineto_trace.decode.iterations import COMPLETE
from kineto_trace.model.context import Context
from kineto_trace.model.trace import API_TABLES, NO_STRING, OP_TABLES, Trace
from kineto_trace.structure.event_arguments import parse

_LITTLE = 0.5  # of the work of the step with the least work, for the last of at least three steps
_ALMOST_NOTHING = 0.02  # likewise for the last of two: the first may have compiled
_ENOUGH_WORK = 50  # operators and calls in each of the other steps, for such a conclusion

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def is_marked_incomplete(trace: Trace, texts: npt.NDArray[np.int32]) -> Flags:
    """Tells for each text of arguments (number into Trace.strings) whether it has the argument "complete": false."""
    used = [number for number in unique_values(texts).tolist() if number != NO_STRING]
    found: Flags = np.isin(texts, [n for n in used if parse(trace.strings[n]).get(COMPLETE) is False])
    return found


def began_before(trace: Trace, number: Ints) -> Flags:
    """Tells which steps of a capture had begun before its window, for traces that were stored without the argument."""
    early = [each[0] for each in trace.target.iterations if each[1] < trace.window_start_ns]
    found: Flags = np.isin(number, early)
    return found


def is_rest(context: Context, start: Ints, end: Ints) -> bool:
    """Tells whether the last of these steps of another profiler holds far less work than any other step."""
    head = context.trace.head
    if head is None or "kinetod" in head or len(start) < 2:
        return False
    little = _LITTLE if len(start) > 2 else _ALMOST_NOTHING
    times = [context.trace.table(kind)["start"] for kind in (*OP_TABLES, *API_TABLES)]
    last = sum(int(np.count_nonzero((time >= start[-1]) & (time < end[-1]))) for time in times)
    if last * (len(start) - 1) >= little * sum(map(len, times)):
        return False  # not less than the mean of the others
    work = np.zeros(len(start), np.int64)
    for time in times:
        at = containing(start, end, time)
        work += np.bincount(at[at >= 0], minlength=len(start))
    least = int(np.min(work[:-1]))
    return least >= _ENOUGH_WORK and last < little * least
