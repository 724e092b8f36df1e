"""Decodes stack samples ("python_stacks/1" and "/2") into python_function slices and the activity of each thread.

Theory of operation
    A sample states that at this time this thread was at this node of the stack trie. A node stands for a whole stack
    prefix. In format 2 a node has an instruction, so that every frame has its line (line_tables.py), and the innermost
    one its callee if its bytecode was recorded (python_callees.py). A sample states whether the thread ran, waited for
    the GIL or was idle, and its CPU time; threads without Python frames are sampled too (node 0). In format 1 the
    sample itself has the line of the innermost frame, and nothing else is known.

    Both formats become `Samples` over a `Trie`, and then slices. The records are not trusted:
    dangling numbers, truncated values and impossible lines are dropped or count as unknown.

Turns samples of Python stacks into slices.
    A slice is a run of consecutive samples of one thread that share the function and its callers at one depth, and the
    lines at which these were called; its own line may change within it. It begins with its first sample and ends with
    the next sample of its thread. A thread that is not seen for more than two periods while other threads are has
    vanished: its slices end when another thread is seen next, after two periods at the latest. A moment at which no
    thread was seen ends nothing: the sampler itself was delayed. Each thread has its own sample times, so "at the same
    tick" means less than half a period apart.

    The samples are sorted by thread and time. Each depth then takes one pass over the samples that reach it, from the
    deepest depth up. All of this is array work, except for the texts of lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from kineto_agent.protocol.records import (
    PYTHON_BYTECODE,
    PYTHON_CODE,
    PYTHON_STACKS_1_FORMAT,
    PYTHON_STACKS_FORMAT,
    SPACE_PYTHON_BYTECODE,
    SPACE_PYTHON_CODE,
    SPACE_STACK_NODE,
    SPACE_THREAD_NAME,
    STACK_HOLDS_GIL,
    STACK_IDLE,
    STACK_NODE,
    STACK_NODE_1,
    STACK_RUNNING,
    STACK_SAMPLE_1_FIELDS,
    STACK_SAMPLE_FIELDS,
    STACK_STATE_MASK,
    STACK_WAIT_MASK,
    STACK_WAIT_SHIFT,
    STACK_WAITS_FOR_GIL,
    WAIT_COLLECTOR,
    WAIT_CPU,
)

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Flags, Ints, UInts64
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, fixed_records, record_dtype
from kineto_trace.decode.python_callees import LOCATIONS, Bytecode, OffsetTable, line_table, opcodes
from kineto_trace.model.line_counts import MAX_LINE, STATES, WAITS, CalleeCount, LineCount, format_callees, format_lines
from kineto_trace.model.trace import NO_MODULE, NO_ROW, NO_STRING, StringTable, Table, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT_1, FORMAT = PYTHON_STACKS_1_FORMAT, PYTHON_STACKS_FORMAT
FORMATS = (FORMAT_1, FORMAT)
DEFAULT_HZ = 100
MAX_THREADS = 4096  # limit of threads whose use is reported: those with the most CPU time
_SAMPLE_1, _SAMPLE = record_dtype(STACK_SAMPLE_1_FIELDS), record_dtype(STACK_SAMPLE_FIELDS)
_MAX_TIME_NS = 1 << 62
MAX_DEPTH = 1024  # frames; deeper nodes are rejected


@dataclass(slots=True)
class _Code:
    """One code object of the string table; its line table is parsed when a line is first requested."""

    name: int
    first_line: int
    kind: int
    raw: bytes
    table: OffsetTable[int] | None = None
    bytecode: Bytecode | None = None

    def line(self, offset: int) -> int:
        """Returns the line of the instruction at this offset; the first line if it is unknown."""
        if offset < 0 or not self.raw:
            return self.first_line
        if self.table is None:
            self.table = line_table(self.kind, self.first_line, self.raw)
        return self.table.at(offset)

    def callee(self, offset: int, strings: StringTable) -> int:
        """Returns the number of the text that names the callee of the instruction at this offset, or NO_STRING."""
        name = self.bytecode.callee(offset) if self.bytecode is not None and self.kind == LOCATIONS else ""
        return strings.add(name) if name else NO_STRING


@dataclass(frozen=True, slots=True)
class Trie:
    """Nodes by index (from 1; 0 means none), and the frames of whose functions they are lines.

    A frame is a function below its caller's frame, called at one line of it.
    """

    keys: UInts64  # node keys, ascending; index = position + 1
    parent: Ints  # of each node: the index of the caller's node
    frame: Ints  # of each node
    line: Ints  # of each node; 0: unknown
    callee: Ints  # of each node: the number of the text that names it; NO_STRING: unknown
    depth: Ints  # of each frame: 0 for the outermost, -1 for frame 0, which means none
    name: Ints  # of each frame: the number of its text
    call_line: Ints  # of each frame: the caller's line; 0: unknown

    def index(self, nodes: AnyArray) -> Ints:
        """Returns the index of each node key; 0 for keys that are not in the table."""
        if not len(self.keys):
            return np.zeros(len(nodes), np.int64)
        at = np.searchsorted(self.keys, nodes)
        at[at == len(self.keys)] = 0
        return np.where(self.keys[at] == nodes, at + 1, 0)


@dataclass(frozen=True, slots=True)
class Samples:
    """One value per sample.

    line: of the innermost frame, 0 if unknown.
    state: number into STATES.
    callee: the number of the text that names that frame's callee; NO_STRING if unknown or none.
    wait: number into WAITS.
    gil_holder: the thread that held the GIL when this one waited for it; 0 if unknown.
    """

    time: Ints
    thread: Ints
    node: Ints
    line: Ints
    callee: Ints
    state: Ints
    wait: Ints
    gil_holder: Ints

    def sorted(self) -> "Samples":
        """Returns the samples sorted by thread and time."""
        order = np.lexsort((self.time, self.thread))
        return Samples(*(getattr(self, column.name)[order] for column in fields(self)))


def decode(source: RawSource, strings: StringTable, window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes the samples inside the window into slices; names go into `strings`.

    Samples whose stack is not in the string table count as undecoded.
    """
    hz = source.metadata.get("hz")
    period = 1_000_000_000 // (hz if isinstance(hz, int) and hz > 0 else DEFAULT_HZ)
    old = source.format == FORMAT_1
    records, cut = fixed_records(source, _SAMPLE_1 if old else _SAMPLE)
    total = len(records)
    records = records[(records["time"] >= 0) & (records["time"] < _MAX_TIME_NS)]
    sane = len(records)
    if window.end_ns:
        records = records[(records["time"] >= window.start_ns) & (records["time"] < window.end_ns)]
    inside = len(records)
    trie = _trie(source, strings, frozenset(unique_values(records["node"]).tolist()))
    nodes = trie.index(records["node"])
    known = (nodes > 0) | ((records["node"] == 0) & (not old))
    records, nodes = records[known], nodes[known]
    samples = _samples_1(records, nodes, trie) if old else _samples(records, nodes, trie)
    table = slices(samples, trie, max(period, 1), strings)
    return Decoded(
        tables={table.kind: table},
        records=total,
        undecoded=cut + total - sane + inside - len(records),
        out_of_window=sane - inside,
        sample_period_ns=period,
        threads={
            tid: name.decode("utf-8", "replace") for tid, name in source.strings.get(SPACE_THREAD_NAME, {}).items()
        },
        thread_use=[] if old else _thread_use(records, samples),
    )


def _samples_1(records: AnyArray, nodes: Ints, trie: Trie) -> Samples:
    line = np.where(records["line"] <= MAX_LINE, records["line"], 0).astype(np.int64)
    unknown = np.zeros(len(records), np.int64)
    times, threads = records["time"].astype(np.int64), records["thread"].astype(np.int64)
    return Samples(times, threads, nodes, line, trie.callee[nodes], unknown, unknown, unknown)


def _samples(records: AnyArray, nodes: Ints, trie: Trie) -> Samples:
    state = (records["state"] & STACK_STATE_MASK).astype(np.int64)
    state[state >= len(STATES)] = 0
    wait = (records["state"] >> STACK_WAIT_SHIFT & STACK_WAIT_MASK).astype(np.int64)
    of_state = np.where(np.isin(wait, (WAIT_CPU, WAIT_COLLECTOR)), STACK_RUNNING, STACK_IDLE)
    wait[(wait >= len(WAITS)) | (state != of_state)] = 0
    times, threads = records["time"].astype(np.int64), records["thread"].astype(np.int64)
    holder = np.where(state == STACK_WAITS_FOR_GIL, _gil_holders(times, threads, records["state"]), 0)
    return Samples(times, threads, nodes, trie.line[nodes], trie.callee[nodes], state, wait, holder)


def _gil_holders(times: Ints, threads: Ints, states: AnyArray) -> Ints:
    """Returns for each sample the thread that held the GIL at that time; 0 if none or several were seen.

    All samples of one look at the threads have the same time. Interpreters may have a GIL each.
    """
    holds = (states & STACK_HOLDS_GIL) != 0
    held, first, count = np.unique(times[holds], return_index=True, return_counts=True)
    if not len(held):
        return np.zeros(len(times), np.int64)
    at = np.minimum(np.searchsorted(held, times), len(held) - 1)
    found: Ints = np.where((held[at] == times) & (count[at] == 1), threads[holds][first[at]], 0)
    return found


def _thread_use(records: AnyArray, samples: Samples) -> list[dict[str, int]]:
    """Returns the use of each thread, threads with the most CPU time first."""
    tids, place = np.unique(samples.thread, return_inverse=True)
    place = place.reshape(-1)

    def count(which: AnyArray) -> list[int]:
        counts: list[int] = np.bincount(place, which, len(tids)).astype(np.int64).tolist()
        return counts

    columns = {
        "thread": tids.tolist(),
        "samples": count(np.ones(len(place))),
        "python": count(samples.node > 0),
        **{name: count(samples.state == number) for number, name in enumerate(STATES) if name},
        **{name: count(samples.wait == number) for number, name in enumerate(WAITS) if name},
        "has_gil": count((records["state"] & STACK_HOLDS_GIL) != 0),
        "cpu_ns": count(records["cpu_us"].astype(np.float64) * 1000),
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return sorted(rows, key=lambda row: -row["cpu_ns"])[:MAX_THREADS]


def _trie(source: RawSource, strings: StringTable, innermost: frozenset[int]) -> Trie:
    """Returns the trie. innermost: keys of the nodes of samples; only these have callees."""
    old = source.format == FORMAT_1
    codes = {}
    for number, raw in source.strings.get(SPACE_PYTHON_CODE, {}).items():
        code = _code_1(raw, strings) if old else _code(raw, strings)
        if code is not None:
            codes[number] = code
    if not old:
        _add_bytecode(source, codes)
    layout = STACK_NODE_1 if old else STACK_NODE
    keys, lines, callees = [], [0], [NO_STRING]
    frames = [0]  # of each node: the function below the caller's frame and its line there, whatever its own line
    parents, depths, names, call_lines = [0], [-1], [0], [0]  # of frames
    index: dict[int, int] = {0: 0}
    known: dict[tuple[int, int, int], int] = {}
    callers = [0]  # of nodes
    for key, raw in sorted(source.strings.get(SPACE_STACK_NODE, {}).items()):
        if len(raw) != layout.size or not key:
            continue
        parent, number, *offset = layout.unpack(raw)
        above = index.get(parent)  # a parent has a smaller number, so it is already known
        code = codes.get(number)
        if above is None or code is None or depths[frames[above]] + 1 >= MAX_DEPTH:
            continue
        frame = known.setdefault((frames[above], lines[above], code.name), len(parents))
        if frame == len(parents):
            parents.append(frames[above])
            depths.append(depths[frames[above]] + 1)
            names.append(code.name)
            call_lines.append(lines[above])
        keys.append(key)
        index[key] = len(keys)
        callers.append(above)
        frames.append(frame)
        lines.append(0 if old else code.line(offset[0]))
        callees.append(code.callee(offset[0], strings) if key in innermost and not old else NO_STRING)
    integers = (np.array(column, np.int64) for column in (callers, frames, lines, callees, depths, names, call_lines))
    return Trie(np.array(keys, np.uint64), *integers)


def _add_bytecode(source: RawSource, codes: Mapping[int, _Code]) -> None:
    known = opcodes(source.metadata.get("python_version"), source.metadata.get("opcodes"))
    if known is None:
        return
    for number, raw in source.strings.get(SPACE_PYTHON_BYTECODE, {}).items():
        if number not in codes or len(raw) < PYTHON_BYTECODE.size:
            continue
        size, names_size = PYTHON_BYTECODE.unpack_from(raw)
        names_at = PYTHON_BYTECODE.size + size
        variables_at = names_at + names_size
        names, variables = (
            part.decode("utf-8", "replace").split("\0") for part in (raw[names_at:variables_at], raw[variables_at:])
        )
        code = codes[number]
        bytecode = raw[PYTHON_BYTECODE.size : names_at]
        code.bytecode = Bytecode(known, bytecode, code.raw, code.first_line, names=names, variables=variables)


def _code_1(raw: bytes, strings: StringTable) -> _Code:
    file, _, rest = raw.partition(b"\0")
    line, _, function = rest.partition(b"\0")
    return _Code(_function_name(file, line, function, strings), 0, 0, b"")


def _code(raw: bytes, strings: StringTable) -> _Code | None:
    if len(raw) < PYTHON_CODE.size:
        return None
    first_line, kind, file_bytes, name_bytes = PYTHON_CODE.unpack_from(raw)
    name_at = PYTHON_CODE.size + file_bytes
    table_at = name_at + name_bytes
    if table_at > len(raw):
        return None
    file, function = raw[PYTHON_CODE.size : name_at], raw[name_at:table_at]
    name = _function_name(file, b"%d" % first_line, function, strings)
    return _Code(name, first_line if first_line <= MAX_LINE else 0, kind, raw[table_at:])


def _function_name(file: bytes, line: bytes, function: bytes, strings: StringTable) -> int:
    """Returns the number of the name in Kineto's form: 'file(first line): function'."""
    return strings.add("%s(%s): %s" % tuple(part.decode("utf-8", "replace") for part in (file, line, function)))


def slices(given: Samples, trie: Trie, period: int, strings: StringTable) -> Table:
    """Returns the samples as a table python_function."""
    samples = given.sorted()
    joined, ends = _continuity(samples.time, samples.thread, period)
    depth = trie.depth[trie.frame[samples.node]]
    levels: list[dict[str, Ints]] = []
    current = samples.node.copy()
    children: dict[str, Ints] | None = None
    for level in range(int(depth.max(initial=-1)), -1, -1):
        active = np.flatnonzero(depth >= level)
        leaf = depth[active] == level
        lines = np.where(leaf, samples.line[active], trie.line[current[active]])
        runs = _runs(active, trie.frame[current], joined, lines)
        runs["leaf"] = np.where(leaf, runs["run_of_sample"], -1)
        if children is not None:
            children["parent"] = runs["run_of_sample"][np.searchsorted(active, children["first"])]
        runs["depth"] = np.full(len(runs["first"]), level)
        runs["active"] = active
        levels.append(runs)
        children = runs
        current[active] = trie.parent[current[active]]
    return _assemble(levels[::-1], samples, ends, trie, strings)


def _continuity(times: Ints, threads: Ints, period: int) -> tuple[Flags, Ints]:
    """Returns for each sample whether it continues the previous one, and the time until which its frames ran."""
    seen = np.sort(times)
    joined = np.zeros(len(times), np.bool_)
    gap = times[1:] - times[:-1]
    later = np.searchsorted(seen, times[:-1] + period // 2, "right")  # the first sample of the next tick
    others = np.searchsorted(seen, times[1:] - period // 2, "left") > later  # any sample between the two ticks
    joined[1:] = (threads[1:] == threads[:-1]) & ((gap <= 2 * period + period // 2) | ~others)
    following = np.searchsorted(seen, times + period // 2, "right")
    ends = np.append(seen, 0)[following]
    ends = np.where(following < len(seen), np.minimum(ends, times + 2 * period), times + period)
    continued = np.flatnonzero(joined)
    ends[continued - 1] = times[continued]  # the thread was seen again, so there is no limit
    return joined, ends


def _runs(active: Ints, frame: Ints, joined: Flags, lines: Ints) -> dict[str, Ints]:
    """Returns runs of samples with the same frame at one depth: first and last sample, frame, count, commonest line."""
    own = frame[active]
    begins = np.ones(len(active), np.bool_)
    begins[1:] = (active[1:] - active[:-1] != 1) | ~joined[active[1:]] | (own[1:] != own[:-1])
    starts = np.flatnonzero(begins)
    counts = np.diff(np.append(starts, len(active)))
    run = np.cumsum(begins) - 1
    return {
        "first": active[starts],
        "last": active[starts + counts - 1],
        "frame": own[starts],
        "samples": counts,
        "line": _most_frequent(run, lines, starts),
        "run_of_sample": run,
        "parent": np.full(len(starts), NO_ROW),
    }


def _most_frequent(run: Ints, lines: Ints, starts: Ints) -> Ints:
    """Returns the most frequent line of each run; the lowest of several; 0 if no line is known."""
    found = lines[starts]
    lowest, highest = np.minimum.reduceat(lines, starts), np.maximum.reduceat(lines, starts)
    mixed = (lowest != highest)[run]
    if mixed.any():
        keys, counts = np.unique(run[mixed] << 32 | lines[mixed], return_counts=True)
        counts[keys & 0xFFFFFFFF == 0] = 0  # a known line takes precedence
        _set_best(found, keys, counts)
    return found


def _set_best(found: Ints, keys: Ints, counts: Ints) -> None:
    """Sets each place to its value with the highest count, the lowest of several. keys: place << 32 | value."""
    best = np.lexsort((-(keys & 0xFFFFFFFF), counts, keys >> 32))  # the last entry of each place is the best one
    found[keys[best] >> 32] = keys[best] & 0xFFFFFFFF


def _assemble(levels: list[dict[str, Ints]], samples: Samples, ends: Ints, trie: Trie, strings: StringTable) -> Table:
    """Joins the runs of all depths into one table, outermost first; parents become row numbers."""
    if not levels:
        return make_table("python_function", 0, {})
    rows = np.cumsum([0, *(len(level["first"]) for level in levels)])
    row_of_sample = np.full(len(samples.time), NO_ROW)  # of the innermost slice
    for number, level in enumerate(levels):
        if number:
            level["parent"] = level["parent"] + rows[number - 1]
        innermost = level["leaf"] >= 0
        row_of_sample[level["active"][innermost]] = level["leaf"][innermost] + rows[number]
    names = ("first", "last", "frame", "samples", "line", "parent", "depth")
    joined = {name: np.concatenate([level[name] for level in levels]) for name in names}
    start = samples.time[joined["first"]]
    placed = row_of_sample >= 0
    own = row_of_sample[placed]
    counts = _counts(own, samples.state[placed], len(STATES), rows[-1])
    waits = _counts(own, samples.wait[placed], len(WAITS), rows[-1])
    columns = {
        "start": start,
        "duration": ends[joined["last"]] - start,
        "name": trie.name[joined["frame"]],
        "thread": samples.thread[joined["first"]],
        "depth": joined["depth"],
        "parent": joined["parent"],
        "samples": joined["samples"],
        "self_samples": np.sum(counts, axis=0),
        **dict(zip(STATES[1:], counts[1:], strict=True)),
        **dict(zip(WAITS[1:], waits[1:], strict=True)),
        "line": joined["line"],
        "lines": _line_texts(own, samples.line[placed], samples.state[placed], rows[-1], strings),
        "callees": _callee_texts(samples, placed, own, rows[-1], strings),
        "module": np.full(len(start), NO_MODULE),
        "call_line": trie.call_line[joined["frame"]],
        "gil_holder": _holder_of_each(own, samples.gil_holder[placed], rows[-1]),
    }
    return make_table("python_function", len(start), columns)


def _counts(row: Ints, numbers: Ints, kinds: int, rows: int) -> list[Ints]:
    """Returns for each kind the number of samples by row."""
    return [np.bincount(row[numbers == kind], minlength=rows) for kind in range(kinds)]


def _holder_of_each(row: Ints, holder: Ints, rows: int) -> Ints:
    """Returns for each row the thread that held the GIL most often while it waited; 0 for rows that never waited."""
    found = np.zeros(rows, np.int64)
    waited = holder > 0
    keys, counts = np.unique(row[waited] << 32 | holder[waited], return_counts=True)
    _set_best(found, keys, counts)
    return found


def _line_texts(row: Ints, line: Ints, state: Ints, rows: int, strings: StringTable) -> Ints:
    """Returns for each row the number of the text with its self samples by line and state."""
    known = line > 0
    keys, place = np.unique(row[known] << 32 | line[known], return_inverse=True)
    counts = np.bincount(place.reshape(-1) * len(STATES) + state[known], minlength=len(keys) * len(STATES))
    texts: dict[int, list[LineCount]] = {}
    for key, by_state in zip(keys.tolist(), counts.reshape(-1, len(STATES)).tolist(), strict=True):
        texts.setdefault(key >> 32, []).append(LineCount(key & 0xFFFFFFFF, tuple(by_state)))  # type: ignore[arg-type]
    found = np.full(rows, NO_STRING, np.int64)
    for number, lines in texts.items():
        found[number] = strings.add(format_lines(lines))
    return found


def _callee_texts(samples: Samples, placed: Flags, row: Ints, rows: int, strings: StringTable) -> Ints:
    """Returns for each row the number of the text with its self samples by line, callee and state.

    placed: which samples are in a row.
    row: of each of these.
    """
    line, callee, state = (column[placed] for column in (samples.line, samples.callee, samples.state))
    known = (line > 0) & (callee != NO_STRING)
    keys, place = np.unique(np.stack([row, line, callee])[:, known], axis=1, return_inverse=True)
    counts = np.bincount(place.reshape(-1) * len(STATES) + state[known], minlength=keys.shape[1] * len(STATES))
    texts: dict[int, list[CalleeCount]] = {}
    for (number, at, name), by_state in zip(keys.T.tolist(), counts.reshape(-1, len(STATES)).tolist(), strict=True):
        texts.setdefault(number, []).append(CalleeCount(at, strings.strings[name], tuple(by_state)))  # type: ignore[arg-type]
    found = np.full(rows, NO_STRING, np.int64)
    for number, callees in texts.items():
        found[number] = strings.add(format_callees(callees))
    return found
