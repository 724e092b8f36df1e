"""Decodes stack samples ("python_stacks/1" and "/2") into python_function slices and the activity of each thread.

Theory of operation
    A sample states that at this time this thread was at this node of the stack trie. A node stands for a whole stack
    prefix. In format 2 a node has an instruction, so that every frame has its line (line_tables.py), and the innermost
    one what it calls if its bytecode was recorded (callees.py). A sample says
    whether the thread ran, waited for the GIL or was idle, and its CPU time; threads without Python frames are sampled
    too (node 0). In format 1 the sample itself has the line of the innermost frame, and nothing else is known.

    Both formats become `Samples` over a `Trie`, which python_slices.py turns into slices. The records are not trusted:
    dangling numbers, truncated values and impossible lines are left out or count as unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.fixed_records import fixed_records, record_dtype
from kineto_trace.decode.python.callees import Bytecode, opcodes
from kineto_trace.decode.python.line_tables import LOCATIONS, LineTable, line_table
from kineto_trace.decode.python.python_slices import MAX_DEPTH, Ints, Samples, Trie, slices
from kineto_trace.model.line_counts import MAX_LINE, STATES, WAITS
from kineto_trace.model.trace import NO_STRING, StringTable
from kineto_trace.spool.raw_records import RawSource

FORMAT_1, FORMAT = PYTHON_STACKS_1_FORMAT, PYTHON_STACKS_FORMAT
FORMATS = (FORMAT_1, FORMAT)
DEFAULT_HZ = 100
MAX_THREADS = 4096  # whose use is reported: those with the most CPU time
_SAMPLE_1, _SAMPLE = record_dtype(STACK_SAMPLE_1_FIELDS), record_dtype(STACK_SAMPLE_FIELDS)
_MAX_TIME_NS = 1 << 62


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


def _samples_1(records: npt.NDArray[Any], nodes: Ints, trie: Trie) -> Samples:
    line = np.where(records["line"] <= MAX_LINE, records["line"], 0).astype(np.int64)
    unknown = np.zeros(len(records), np.int64)
    times, threads = records["time"].astype(np.int64), records["thread"].astype(np.int64)
    return Samples(times, threads, nodes, line, trie.callee[nodes], unknown, unknown, unknown)


def _samples(records: npt.NDArray[Any], nodes: Ints, trie: Trie) -> Samples:
    state = (records["state"] & STACK_STATE_MASK).astype(np.int64)
    state[state >= len(STATES)] = 0
    wait = (records["state"] >> STACK_WAIT_SHIFT & STACK_WAIT_MASK).astype(np.int64)
    of_state = np.where(np.isin(wait, (WAIT_CPU, WAIT_COLLECTOR)), STACK_RUNNING, STACK_IDLE)
    wait[(wait >= len(WAITS)) | (state != of_state)] = 0
    times, threads = records["time"].astype(np.int64), records["thread"].astype(np.int64)
    holder = np.where(state == STACK_WAITS_FOR_GIL, _gil_holders(times, threads, records["state"]), 0)
    return Samples(times, threads, nodes, trie.line[nodes], trie.callee[nodes], state, wait, holder)


def _gil_holders(times: Ints, threads: Ints, states: npt.NDArray[Any]) -> Ints:
    """Returns for each sample the thread that held the GIL at that time; 0 if none was seen, or several were.

    All samples of one look at the threads have the same time. Interpreters may have a GIL each.
    """
    holds = (states & STACK_HOLDS_GIL) != 0
    held, first, count = np.unique(times[holds], return_index=True, return_counts=True)
    if not len(held):
        return np.zeros(len(times), np.int64)
    at = np.minimum(np.searchsorted(held, times), len(held) - 1)
    found: Ints = np.where((held[at] == times) & (count[at] == 1), threads[holds][first[at]], 0)
    return found


def _thread_use(records: npt.NDArray[Any], samples: Samples) -> list[dict[str, int]]:
    """Returns what each thread did, threads with the most CPU time first."""
    tids, place = np.unique(samples.thread, return_inverse=True)
    place = place.reshape(-1)

    def count(which: npt.NDArray[Any]) -> list[int]:
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


# ------------------------------------------------------------ stacks


@dataclass(slots=True)
class _Code:
    """One code object of the string table; its line table is parsed when a line is first requested."""

    name: int
    first_line: int
    kind: int
    raw: bytes
    table: LineTable | None = None
    bytecode: Bytecode | None = None

    def line(self, offset: int) -> int:
        """Returns the line of the instruction at this offset; the first line if it is unknown."""
        if offset < 0 or not self.raw:
            return self.first_line
        if self.table is None:
            self.table = line_table(self.kind, self.first_line, self.raw)
        return self.table.line(offset)

    def callee(self, offset: int, strings: StringTable) -> int:
        """Returns the number of the text that names what the instruction at this offset calls, or NO_STRING."""
        name = self.bytecode.callee(offset) if self.bytecode is not None and self.kind == LOCATIONS else ""
        return strings.add(name) if name else NO_STRING


def _trie(source: RawSource, strings: StringTable, innermost: frozenset[int]) -> Trie:
    """Returns the trie. innermost: keys of the nodes that samples stand at; only these have callees."""
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
