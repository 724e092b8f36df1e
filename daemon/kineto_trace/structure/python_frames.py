"""Python frames by samples and exact calls: their moments, their callees, and the use of threads.

Theory of operation
    library_calls.py determines whether a frame is the user's, and what a library's frame does (sleep, wait for a lock,
    read a file, log, …); it counts for the innermost function of the user that called it, and of several such frames
    the more specific kind counts (data loading before a lock). Data loading also includes its callees, a collate
    function of the user's for example. Where stacks were sampled, C functions have no frames: a function that was off
    the CPU in most of its own samples waited for the GIL, or was blocked; the system calls of these samples show by
    what. A function of torch.distributed that is blocked waits for a collective.

    Sampled stacks are true only at the moments of their samples, which are assumed to be equally spread over the span
    in which the innermost frame stayed the same.

Callees in samples that are not Python functions, by slice and line, with their purposes.

A callee has its name in the source (line_counts.py). The table maps it to a purpose by that name alone, so it has only
unambiguous names: functions with their module's usual name, and methods that no other well-known class has. They call
no Python function, unlike the functions in the table of library_calls.py.

Samples of Python stacks by function, line and state: running, waiting for the GIL, idle.

Only the innermost frame of a sample counts. Samples without the thread's state (of older captures and other tools) have
an unknown one; they rank like running ones.

The innermost Python frame of a thread in given intervals of time.
    Exact calls are cut where frames change. Samples are true at their moments alone: an interval belongs in equal parts
    to the samples in it. Intervals without a sample are given, in proportion, to the functions that were sampled in
    other intervals of the same key: with a hundred samples a second, many gaps have none, but gaps recur.

    The first sample of a span with the same innermost frame begins the span. The moments of the others are estimates:
    those too close to the edge of an interval to know on which side they were are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Cut, ascending, cut
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, Ints8, UInts8, UInts32
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES, WAITS, parse_callees, parse_lines
from kineto_trace.model.target_info import TargetInfo, header_value
from kineto_trace.model.trace import Table, Trace
from kineto_trace.structure.library_calls import CallKind, FrameKind, function_kinds
from kineto_trace.structure.nesting import Nested, nest_tables, recorded

_IDLE_COLUMNS = (("idle_sleep",), ("idle_lock",), ("idle_poll", "idle_io", "idle_child"))
_TABLE: tuple[tuple[CallKind, str], ...] = (
    (CallKind.PICKLE, r"(?:c?[Pp]ickle|_pickle|marshal)\.(?:dump|load)s?"),
    (CallKind.JSON, r"(?:orjson|ujson|rapidjson|msgspec\.json)\.\w+|(?:.*\.)?(?:c_make_encoder|scan_once)"),
    (CallKind.ITEM, r".*\.(?:item|tolist)"),
    (CallKind.ARCHIVE, r"(?:zlib|gzip|bz2|lzma|zstd|zstandard|lz4(?:\.\w+)?|snappy|brotli)\.(?:de)?compress\w*"),
    (CallKind.HASH, r"(?:hashlib|_hashlib|xxhash|hmac)\.\w+|(?:zlib|binascii)\.(?:crc32|adler32)|.*\.hexdigest"),
    (CallKind.GARBAGE, r"gc\.collect"),
    (CallKind.SLEEP, r"time\.sleep"),
    (CallKind.LOGGING, r"print|sys\.std(?:out|err)\.(?:write|flush)"),
    (CallKind.SUBPROCESS, r"os\.(?:system|fork|posix_spawnp?|waitpid)"),
    (CallKind.FILE, r"open|os\.(?:open|p?read|p?write|fsync|fdatasync|listdir|scandir|l?stat|replace|rename|unlink)"),
    (CallKind.DATABASE, r"sqlite3\.\w+|.*\.(?:commit|execute|executemany|executescript|fetchall|fetchone|fetchmany)"),
    (CallKind.CONVERT, r"(?:np|numpy)\.(?:array|asarray|fromiter)|torch\.(?:tensor|as_tensor)"),
)
_KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in _TABLE)
UNKNOWN, RUNNING, WAITING, IDLE = range(len(STATES))
MAX_PERIOD_NS = 10**12
_IDLE = "idle_"
JITTER_SHARE = 10  # a sample is late or early by less than a tenth of the period
MAX_SAMPLES = 4_000_000  # of a thread: a file may state any period
MAX_VALUE = 2**62


@dataclass(frozen=True, slots=True)
class PythonFrames:
    """The frames of all threads in the order of their tree (places of `nested`).

    row: of python_function.
    name: number into Trace.strings.
    user: place of the innermost function of the user's at this frame, or NOTHING.
    kind: FrameKind.
    samples: whether the frames come from samples.
    period_ns: the time between two of them.
    """

    nested: Nested
    row: Ints
    name: Ints
    user: Ints
    kind: UInts8
    samples: bool
    period_ns: int

    def innermost(self, thread: UInts32, moment: Ints) -> Ints:
        """Returns the place of the innermost frame of a thread at each moment; NOTHING: none."""
        if not len(self.row):
            return np.full(len(moment), NOTHING)
        return self.nested.innermost(thread, moment).astype(np.int64)

    def stack(self, row: int) -> list[int]:
        """Returns the names (string numbers) of a row of python_function and its callers, innermost first."""
        place, names = int(np.flatnonzero(self.row == row)[0]), []
        while place >= 0:
            names.append(int(self.name[place]))
            place = int(self.nested.tree.parent[place])
        return names

    def changes(self, thread: int) -> Ints:
        """Returns the times, ascending, at which a frame of this thread begins or ends."""
        own = self.nested.events.track == thread
        return ascending(np.concatenate([self.nested.events.start[own], self.nested.tree.end[own]]))


@dataclass(frozen=True, slots=True)
class CalleeSamples:
    """Self samples at calls, one value per slice, line and callee.

    row: of python_function.
    name: place in `names`.
    counts: by state.
    """

    names: list[str]
    row: Ints
    line: Ints
    name: Ints
    counts: Ints  # (…, 4)


@dataclass(frozen=True, slots=True)
class LineSamples:
    """Self samples of slices, one value per slice and line.

    row: of python_function.
    line: 0 if unknown.
    counts: by state.
    busy: running or unknown.
    """

    row: Ints
    line: Ints
    counts: Ints  # (…, 4)

    @property
    def busy(self) -> Ints:
        """Returns the number of samples in which it ran or its state is unknown."""
        total: Ints = self.counts[:, RUNNING] + self.counts[:, UNKNOWN]
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadUse:
    """The use of one thread.

    samples: their number.
    python: samples with Python frames.
    has_gil: samples in which it held the GIL.
    """

    thread: int
    samples: int
    python: int
    running: int
    waiting: int
    idle: int
    has_gil: int
    cpu_ns: int
    idle_sleep: int = 0  # as in the columns of python_function; 0 in older traces
    idle_lock: int = 0
    idle_poll: int = 0
    idle_io: int = 0
    idle_child: int = 0
    idle_driver: int = 0
    idle_memory: int = 0
    ready: int = 0
    collecting: int = 0


_NAMES = tuple(field.name for field in fields(ThreadUse))


def python_tree(context: Context) -> Nested:
    """Returns all rows of python_function as a tree."""
    return nest_tables([context.trace.table("python_function")], context.trace.window_end_ns)


def python_frames(context: Context) -> PythonFrames:
    """Returns the frames of a trace."""
    trace = context.trace
    table = trace.table("python_function")
    nested = context.get(python_tree)
    row = nested.order.astype(np.int64)
    names, kinds = table["name"][row], context.get(function_kinds)
    is_user, own = kinds.user[names], kinds.frame[names]
    samples = bool((table["self_samples"] > 0).any())
    user, kind = _inherited(nested, is_user, own)
    if samples:
        kind = np.where(kind == FrameKind.RUNNING, _sampled(table, row, kinds.call[names]), kind)
    period = (
        sample_period_ns(trace) or int(np.median(table["duration"] // np.maximum(table["samples"], 1)))
        if samples
        else 0
    )
    return PythonFrames(nested, row, names.astype(np.int64), user, kind, samples, period)


def _sampled(table: Table, row: Ints, call: Ints8) -> UInts8:
    """Returns what threads did in these rows of python_function, by most of the samples in which they ran themselves.

    A caller that was off the CPU in its own samples says nothing about its callees.
    """
    counts = state_counts(table)[row]
    most = 2 * counts > counts.sum(axis=1, keepdims=True)
    idle = most[:, IDLE]
    asleep, locked, io = (
        idle & (2 * sum(table[name][row] for name in names) > counts[:, IDLE]) for names in _IDLE_COLUMNS
    )
    return np.select(
        [idle & (call == CallKind.COLLECTIVE), asleep, locked, io, idle, most[:, WAITING]],
        [
            FrameKind.COLLECTIVE,
            FrameKind.SLEEP,
            FrameKind.LOCK,
            FrameKind.INPUT_OUTPUT,
            FrameKind.BLOCKED,
            FrameKind.GIL,
        ],
        FrameKind.RUNNING,
    ).astype(np.uint8)


def _inherited(nested: Nested, is_user: Flags, own: UInts8) -> tuple[Ints, UInts8]:
    """Returns the innermost function of the user's at each frame, and the most telling kind below it."""
    parent, depth = nested.tree.parent.astype(np.int64), nested.tree.depth
    user = np.where(is_user, np.arange(len(parent)), NOTHING)
    kind = own.copy()
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=-1)) + 2))
    for first, last in zip(bounds[1:-1], bounds[2:], strict=True):
        places = by_depth[first:last]
        above = parent[places]
        inherits = ~is_user[places]
        user[places[inherits]] = user[above[inherits]]
        passed = np.where(inherits | (kind[above] == FrameKind.DATA), kind[above], FrameKind.RUNNING)
        kind[places] = np.maximum(kind[places], passed)
    return user, kind


def callee_samples(trace: Trace) -> CalleeSamples:
    """Returns all self samples of the trace whose callee is known."""
    table = trace.table("python_function")
    rows = np.flatnonzero((table["callees"] >= 0) & (table["self_samples"] > 0))
    parsed = {number: parse_callees(trace.strings[number]) for number in unique_values(table["callees"][rows]).tolist()}
    numbers: dict[str, int] = {}
    flat = [
        (row, entry.line, numbers.setdefault(entry.callee, len(numbers)), *entry.counts)
        for row, number in zip(rows.tolist(), table["callees"][rows].tolist(), strict=True)
        for entry in parsed[number]
    ]
    columns = np.array(flat, np.int64).reshape(-1, 3 + len(STATES))
    return CalleeSamples(list(numbers), columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3:])


def callee_kind(name: str) -> CallKind:
    """Returns the purpose of a callee of this name; NONE if unknown."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), CallKind.NONE)


def state_counts(table: Table) -> Ints:
    """Returns the self samples by state for each row of python_function; invalid negative counts become 0."""
    known = np.maximum(np.stack([table[name].astype(np.int64) for name in STATES[1:]], axis=1), 0)
    unknown = np.maximum(table["self_samples"] - known.sum(axis=1), 0)
    return np.column_stack([unknown, known])


def line_samples(trace: Trace) -> LineSamples:
    """Returns all self samples of the trace by slice and line."""
    table = trace.table("python_function")
    rows = np.flatnonzero(table["self_samples"] > 0)
    numbers, place = np.unique(table["lines"][rows], return_inverse=True)
    place = place.reshape(-1)
    texts = [parse_lines(trace.strings[number]) if number >= 0 else [] for number in numbers.tolist()]
    flat = [entry for text in texts for entry in text]
    lines = np.array([entry.line for entry in flat], np.int64)
    counts = np.array([entry.counts for entry in flat], np.int64).reshape(-1, len(STATES))
    size = np.array([len(text) for text in texts], np.int64)[place]
    first = np.cumsum([0, *map(len, texts)])[:-1][place]
    within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    chosen = np.repeat(first, size) + within
    told = np.zeros((len(rows), len(STATES)), np.int64)
    np.add.at(told, np.repeat(np.arange(len(rows)), size), counts[chosen])
    rest = np.maximum(state_counts(table)[rows] - told, 0)
    without = np.flatnonzero(rest.sum(axis=1) > 0)
    return LineSamples(
        np.concatenate([np.repeat(rows, size), rows[without]]),
        np.concatenate([lines[chosen], np.zeros(len(without), np.int64)]),
        np.concatenate([counts[chosen], rest[without]]),
    )


def idle_reasons(counts: Sequence[int]) -> str | None:
    """Returns the reasons of idle samples as text, "lock 12, sleep 3"; None if none is known.

    counts: one for each of WAITS.
    """
    named = zip(counts, WAITS, strict=True)
    parts = sorted(((count, name.removeprefix(_IDLE)) for count, name in named if name.startswith(_IDLE)), reverse=True)
    return ", ".join(f"{name} {count}" for count, name in parts if count) or None


def sample_period_ns(trace: Trace) -> int:
    """Returns the time between two samples of a thread; 0 if unknown."""
    if trace.sample_period_ns or trace.head is None:
        return trace.sample_period_ns
    ours = header_value(trace.head, "kinetod")
    found = ours.get("sample_period_ns") if isinstance(ours, Mapping) else None
    return found if type(found) is int and 0 < found < MAX_PERIOD_NS else 0


def frames_in(frames: PythonFrames, thread: int, start: Ints, end: Ints, key: Ints) -> tuple[Cut, Ints]:
    """Divides intervals (Unix ns) among the frames of a thread; returns the pieces and the place of each one's frame.

    key: of each interval; similar ones have the same.

    The place is NOTHING if the thread had no frame, or none is known.
    """
    if frames.samples:
        return _sampled_moments(frames, thread, start, end, key)
    pieces = cut(start, end, frames.changes(thread))
    return pieces, frames.innermost(np.full(len(pieces.start), thread, np.uint32), pieces.start)


def _sampled_moments(frames: PythonFrames, thread: int, start: Ints, end: Ints, key: Ints) -> tuple[Cut, Ints]:
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
    """Returns a frame for each piece without one, from pieces of the same key in proportion to their samples.

    NOTHING if no piece of the key has a frame. Pieces are assigned as a whole, so that all of a key's time is divided.
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


def _share_until(key: Ints, weight: Ints, keys: int, *, middle: bool = False) -> Floats:
    """Returns which share of its key's weight lies up to the end, or the middle, of each value. Keys ascend."""
    whole = np.bincount(key, weight, minlength=keys)
    before = np.cumsum(whole) - whole
    until = np.cumsum(weight) - before[key] - (weight / 2 if middle else 0)
    found: Floats = np.clip(until / whole[key], 0, 1 - 1e-9)
    return found


def thread_use(target: TargetInfo) -> list[ThreadUse]:
    """Returns all sampled threads by CPU time; malformed entries are skipped."""
    found = []
    for entry in target.thread_use:
        values = (
            {name: entry.get(name, 0 if name in WAITS else None) for name in _NAMES} if isinstance(entry, dict) else {}
        )
        if values and all(type(value) is int and 0 <= value < MAX_VALUE for value in values.values()):
            found.append(ThreadUse(**values))  # type: ignore[arg-type]
    return sorted(found, key=lambda use: (-use.cpu_ns, use.thread))


def is_native(use: ThreadUse) -> bool:
    """Returns whether no sample saw Python in this thread."""
    return use.python == 0


def window_ns(trace: Trace) -> int:
    """Returns the length of the window in which stacks were recorded, at least 1."""
    return max(recorded(trace, ("python_function",)).length(), 1)
