"""Which Python frame was the innermost one of a thread in given intervals of time.

Theory of operation
    Exact calls are cut where frames change. Samples are true at their moments alone: an interval belongs in equal parts
    to the samples in it. Intervals without a sample are given, in proportion, to the functions that were sampled in
    other intervals of the same key: with a hundred samples a second, many a gap has none, but gaps recur.

    The first sample of a stretch with the same innermost frame begins the stretch. The moments of the others are
    estimates: where they are too close to the edge of an interval to say on which side they were, they are left out.
"""

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.active_sets import Cut, cut
from kineto_trace.arrays.row_groups import group
from kineto_trace.structure.python.python_frames import PythonFrames

NOTHING = -1
JITTER_SHARE = 10  # a sample is late or early by less than a tenth of the period
MAX_SAMPLES = 4_000_000  # of a thread: a file may state any period

Ints = npt.NDArray[np.int64]


def frames_in(frames: PythonFrames, thread: int, start: Ints, end: Ints, key: Ints) -> tuple[Cut, Ints]:
    """Divides intervals (Unix ns) among the frames of a thread; returns the pieces and the place of each one's frame.

    key: of each interval: those that are alike have the same. NOTHING: no frame was the thread's, or none is known.
    """
    if frames.samples:
        return _sampled(frames, thread, start, end, key)
    pieces = cut(start, end, frames.changes(thread))
    return pieces, frames.innermost(np.full(len(pieces.start), thread, np.uint32), pieces.start)


def _sampled(frames: PythonFrames, thread: int, start: Ints, end: Ints, key: Ints) -> tuple[Cut, Ints]:
    """Divides pieces equally among the samples in them; those without any are like similar ones."""
    moments, places = _samples(frames, thread, np.sort(np.concatenate([start, end])))
    first, last = (np.searchsorted(moments, side) for side in (start, end))
    share = np.maximum(last - first, 1)
    owner = np.repeat(np.arange(len(share)), share)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(share) - share, share)
    length = (end - start)[owner]
    low = start[owner] + length * within // share[owner]
    high = start[owner] + length * (within + 1) // share[owner]
    seen = (last > first)[owner]
    frame = np.full(len(owner), NOTHING)
    frame[seen] = places[(first[owner] + within)[seen]]
    frame[~seen] = _in_proportion(key[owner], high - low, frame, frames)
    return Cut(owner, low, high), frame


def _samples(frames: PythonFrames, thread: int, edges: Ints) -> tuple[Ints, Ints]:
    """Returns the moments of a thread's samples, ascending, and the place of the innermost frame at each.

    edges: of intervals, ascending.
    """
    changes = frames.changes(thread)
    if not len(changes):
        return changes, changes
    place = frames.innermost(np.full(len(changes) - 1, thread, np.uint32), changes[:-1])
    length = np.diff(changes)
    period_ns = max(frames.period_ns, int(length[place >= 0].sum()) // MAX_SAMPLES, 1)
    count = np.where(place >= 0, np.maximum(np.rint(length / period_ns).astype(np.int64), 1), 0)
    owner = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    moments = changes[:-1][owner] + length[owner] * within // count[owner]
    at = np.searchsorted(edges, moments)
    far = np.minimum(moments - edges[np.maximum(at - 1, 0)], edges[np.minimum(at, len(edges) - 1)] - moments)
    sure = (within == 0) | (np.abs(far) >= frames.period_ns // JITTER_SHARE)
    return moments[sure], place[owner][sure]


def _in_proportion(key: Ints, length: Ints, frame: Ints, frames: PythonFrames) -> Ints:
    """Returns a frame for each piece without one: those of the pieces of the same key, by the number of their samples.

    NOTHING where no piece of the key has a frame. Pieces are given out whole, so that all of a key's time is divided.
    """
    seen, missing = np.flatnonzero(frame >= 0), np.flatnonzero(frame < 0)
    if not len(seen) or not len(missing):
        return np.full(len(missing), NOTHING)
    keys, number = np.unique(key, return_inverse=True)
    place = frame[seen]
    user = frames.user[place]
    name = np.where(user >= 0, frames.name[user], NOTHING)
    functions = group([number[seen], name, frames.kind[place]])
    own = number[seen][functions.first]  # key of each function
    order = np.argsort(own, kind="stable")
    until = own[order] + _share_until(own[order], functions.sizes()[order], len(keys))
    asked = missing[np.argsort(number[missing], kind="stable")]
    half = _share_until(number[asked], length[asked], len(keys), middle=True)
    at = np.minimum(np.searchsorted(until, number[asked] + half), len(until) - 1)
    found = np.full(len(key), NOTHING)
    found[asked] = np.where(own[order][at] == number[asked], place[functions.first[order][at]], NOTHING)
    return found[missing]


def _share_until(key: Ints, weight: Ints, keys: int, *, middle: bool = False) -> npt.NDArray[np.float64]:
    """Returns which share of its key's weight lies up to the end of each value, or its middle. Keys ascend."""
    whole = np.bincount(key, weight, minlength=keys)
    before = np.cumsum(whole) - whole
    until = np.cumsum(weight) - before[key] - (weight / 2 if middle else 0)
    found: npt.NDArray[np.float64] = np.clip(until / whole[key], 0, 1 - 1e-9)
    return found
