"""Builds the tables of a trace from the columns that the native reader of Chrome traces made.

Theory of operation
    The reader delivers each row as it is in the file. This module derives the rest of the tables with array operations:

    - Threads. A row's pid and tid form a track. Tracks with host rows are threads, numbered by their tid. If two
      threads have the same tid (in files of several processes), the one with more rows keeps it; the other gets a
      number from MADE_UP on, as does a thread whose tid is a text without a number. 7 and "7" are the same thread:
      older files use texts for operators and numbers for allocations. Rows of GPUs, flows and others have the number of
      their track's thread, otherwise their tid.
    - GPU rows have a device and a stream among their arguments, or they are on the row of the stream (tid) in the
      process of the device (pid).
    - Ops have ids: their external id, or a free number if that is missing or already taken. If any id was replaced, the
      origin column external_id keeps the file's own ids.
    - A backward op names the thread of its forward op by torch's own thread number. Arrows (fwdbwd) from a thread to a
      backward op show which thread that is.
    - Ids (correlation, external id, arrows) are unique within a process. Mergers of ranks put a label in front of all
      pids, also those of GPU rows ("[TP00] 10"): such ids are made unique in the file, and the origin keeps the file's.
      In other files, work whose id calls of several processes have belongs to none of them.
    - Python calls refer to their caller by "Python parent id"; in files without such ids the times show the caller.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from kineto_agent.protocol.records import SCOPE_BACKWARD_FUNCTION, SCOPE_USER

from kineto_trace.arrays.id_sets import distinct, lookup
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import AnyArray, Flags, Ints, UInts32, UInts64
from kineto_trace.base.quantities import times
from kineto_trace.decode.activity_names import MEMCPY_KINDS, MEMORY_KINDS, OVERHEAD_KINDS, SYNC_TYPES
from kineto_trace.decode.torch.kineto_text import depths
from kineto_trace.formats.chrome.chrome_native_reader import Parser
from kineto_trace.formats.chrome.counter_tracks import fill_counters, with_lengths
from kineto_trace.model.activity_tables import COUNTER, FIRST_ARG_BIT, KINDS, TS, table_of
from kineto_trace.model.trace import (
    API_TABLES,
    FILE_TABLES,
    GPU_TABLES,
    HOST_TABLES,
    NO_ROW,
    NO_STRING,
    OP_TABLES,
    SCHEMAS,
    TEXT_ID,
    Table,
    make_table,
)
from kineto_trace.structure.nesting import nest_tables

MADE_UP = 1 << 31  # first number given to threads whose tid cannot be used
FLOW_CATEGORIES = ("fwdbwd", "forward_backward")
OP_ID = "op_id"  # origin column of ops in files of several processes, while their tables are made
_IDS = (("correlation", "wait_on_correlation"), ("external_id",), ("id",))  # columns with ids of the same kind
_LABEL = re.compile(r"\[[^\]]+\]")  # of the rank, in front of a pid
_UNKNOWN_DEVICE = 0xFFFFFFFF
_NUMBER = re.compile(r"\d{1,9}(?!\d)")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_SAMPLED_TEXTS = {  # columns of sampled slices
    "lines": re.compile(r'"lines": ?"([0-9:;, a-z]+)"'),
    "callees": re.compile(r'"callees": ?"([0-9:;, A-Za-z_.]+)"'),
}
_MEMCPY = re.compile(r"Memcpy (\w+)(?: \(([\w ]+) -> ([\w ]+)\))?")
_MEMSET = re.compile(r"Memset \(([\w ]+)\)")
_OVERHEADS = {name: number for number, name in OVERHEAD_KINDS.items()}

Columns = dict[str, AnyArray]


@dataclass(frozen=True, slots=True)
class ChromeTracks:
    """The (pid, tid) pairs of a file, and the numbers of their threads. host: whether the track has host rows."""

    pid: Ints
    tid: Ints
    thread: UInts32
    host: Flags
    rows: Ints  # number of host rows


@dataclass(frozen=True, slots=True)
class ChromeRows:
    """All rows of a file. strings: the file's texts."""

    tables: Mapping[str, Table]
    tracks: ChromeTracks
    strings: list[str]
    notes: tuple[str, ...] = ()


def build(parser: Parser, base_ns: int) -> ChromeRows:
    """Builds the tables of what the parser has read; all times are relative to base_ns (Unix ns)."""
    strings = parser.strings()
    parts = {kind: columns for kind in KINDS if (columns := parser.take(kind))}
    tracks = _tracks(parser.tracks(), parts, strings)
    of_file, notes = _separate_processes(parts, tracks, strings)
    tables: dict[str, Table] = {}
    for kind in list(parts):
        columns = parts.pop(kind)
        columns["start"] += base_ns
        table = _table(kind, columns, tracks, strings)
        tables[kind] = Table(kind, table.columns, {**table.origin, **of_file.get(kind, {})})
    tables.update(_ops({kind: tables[kind] for kind in OP_TABLES if kind in tables}))
    if COUNTER in tables:
        tables[COUNTER] = with_lengths(tables[COUNTER], tables.get("other", make_table("other", 0, {})), strings)
    notes += _without_duration(tables, strings)
    if "cpu_op" in tables and "flow" in tables:
        tables["cpu_op"] = _with_torch_threads(tables["cpu_op"], tables["flow"], strings)
    return ChromeRows(tables, tracks, strings, notes)


# ---- threads


def _tracks(pairs: Ints, parts: Mapping[str, Columns], strings: Sequence[str]) -> ChromeTracks:
    count = len(pairs)
    rows = np.zeros(count, np.int64)
    for kind in HOST_TABLES:
        if kind in parts:
            rows += np.bincount(parts[kind]["track"], minlength=count)
    thread = np.zeros(count, np.uint32)
    taken: set[int] = set()
    known: dict[tuple[int | str, int | str], int] = {}
    made = MADE_UP
    for track in np.argsort(-rows, kind="stable").tolist():
        pid, tid = pairs[track].tolist()
        same = (whole_number(pid, strings), whole_number(tid, strings))  # 7 and "7" are one thread
        number = known.get(same, _number(tid, strings))
        if rows[track] and same not in known:
            if number is None or number in taken:
                number, made = made, made + 1
            taken.add(number)
            known[same] = number
        thread[track] = number or 0
    return ChromeTracks(pairs[:, 0].copy(), pairs[:, 1].copy(), thread, rows > 0, rows)


def whole_number(value: int, strings: Sequence[str]) -> int | str:
    """Returns a pid or tid as the file has it, but a text that is an integer as that integer."""
    if value > TEXT_ID:
        return value
    text = strings[TEXT_ID - value]
    return int(text) if _WHOLE.fullmatch(text) else text


def _number(value: int, strings: Sequence[str]) -> int | None:
    """Returns a pid or tid as a number: itself, or the first number in its text; None if there is neither."""
    if value <= TEXT_ID:
        found = _NUMBER.search(strings[TEXT_ID - value])
        return int(found[0]) if found else None
    return value if 0 <= value < MADE_UP else None


# ---- ids of several processes


def _separate_processes(
    parts: Mapping[str, Columns], tracks: ChromeTracks, strings: Sequence[str]
) -> tuple[dict[str, Columns], tuple[str, ...]]:
    """Makes the ids of several processes unique. Returns the file's own ids by kind and column, and notes."""
    labels: dict[str, int] = {}
    label = np.array([_label(pid, strings, labels) for pid in tracks.pid.tolist()], np.int64)
    if len(labels) < 2:
        return _without_shared(parts, tracks)
    of_file: dict[str, Columns] = {}
    for names in _IDS:
        held = [(kind, name) for name in names for kind, columns in parts.items() if _has_id(kind, columns, name)]
        values = [parts[kind][name].astype(np.int64) for kind, name in held]
        owners = [label[parts[kind]["track"]] for kind, _ in held]
        if not held:
            continue
        joined, owner = np.concatenate(values), np.concatenate(owners)
        numbers = group([owner, joined]).number + 1
        numbers[joined <= 0] = 0
        for (kind, name), part in zip(
            held, np.split(numbers, np.cumsum([len(each) for each in values])[:-1]), strict=True
        ):
            own = parts[kind][name]
            of_file.setdefault(kind, {})[name] = own
            if kind in OP_TABLES:
                parts[kind][OP_ID] = part
            else:
                parts[kind][name] = part.astype(own.dtype)
    return of_file, ("the file contains the traces of several ranks; to analyse one rank, use that rank's own trace",)


def _label(pid: int, strings: Sequence[str], labels: dict[str, int]) -> int:
    """Returns the number of the label in front of a pid; 0 if it has none."""
    found = _LABEL.match(strings[TEXT_ID - pid]) if pid <= TEXT_ID else None
    return labels.setdefault(found[0], len(labels) + 1) if found else 0


def _has_id(kind: str, columns: Columns, name: str) -> bool:
    return name in columns and (name != "id" or kind == "flow")


def _without_shared(parts: Mapping[str, Columns], tracks: ChromeTracks) -> tuple[dict[str, Columns], tuple[str, ...]]:
    """Takes the correlation from GPU work if calls of several processes have the same; returns as above."""
    calls = [parts[kind] for kind in API_TABLES if "correlation" in parts.get(kind, {})]
    if not calls:
        return {}, ()
    used = sum(np.bincount(columns["track"], minlength=len(tracks.pid)) for columns in calls)
    if len(distinct(tracks.pid[used > 0])) < 2:
        return {}, ()
    correlation = np.concatenate([columns["correlation"] for columns in calls])
    pid = np.concatenate([tracks.pid[columns["track"]] for columns in calls])
    pairs = group([correlation, pid]).first
    values, counts = np.unique(correlation[pairs], return_counts=True)
    shared = values[(counts > 1) & (values > 0)]
    of_file: dict[str, Columns] = {}
    taken = 0
    for kind, columns in parts.items():
        if kind in GPU_TABLES and "correlation" in columns and len(shared):
            mine = np.isin(columns["correlation"], shared)
            of_file[kind] = {"correlation": columns["correlation"]}
            columns["correlation"] = np.where(mine, 0, columns["correlation"])
            if "external_id" in columns:
                of_file[kind]["external_id"] = columns["external_id"]
                columns["external_id"] = np.where(mine, 0, columns["external_id"])
            taken += int(mine.sum())
    note = (
        f"{times(taken, 'GPU activity has an id', 'GPU activities have ids')} that calls of several processes share, "
        "so it is unknown what launched them; use the trace of one process"
    )
    return of_file, (note,) if taken else ()


# ---- tables


def _without_duration(tables: Mapping[str, Table], strings: Sequence[str]) -> tuple[str, ...]:
    """Returns a note on events of GPU work that have no usable duration and so are none of its rows."""
    other = tables.get("other")
    if other is None:
        return ()
    categories = distinct(other["category"][(other["phase"] == ord("X")) & (other["category"] >= 0)])
    of_gpu = [number for number in categories.tolist() if table_of(strings[number]) in GPU_TABLES]
    count = int(np.count_nonzero(np.isin(other["category"], of_gpu) & (other["phase"] == ord("X"))))
    if not count:
        return ()
    return (f"{times(count, 'GPU activity has', 'GPU activities have')} no possible duration and cannot be evaluated",)


def _table(kind: str, columns: Columns, tracks: ChromeTracks, strings: list[str]) -> Table:
    schema = {column.name for column in SCHEMAS[kind]}
    track = columns.pop("track")
    present = columns["present"]
    origin = {"pid": tracks.pid[track], "tid": tracks.tid[track]}
    origin.update((name, columns.pop(name)) for name in ("present", "members", "place"))
    origin["category"] = columns["category"] if "category" in schema else columns.pop("category")
    args = columns.pop("args")
    if "inputs" in schema:
        columns["inputs"] = args
        origin["args"] = np.full(len(args), -1, np.int32)
    else:
        origin["args"] = args
    columns.update((key, _sampled_texts(args, strings, text)) for key, text in _SAMPLED_TEXTS.items() if key in schema)
    if "id" in columns and kind != "flow":
        origin["member_id"] = columns.pop("id")
    phase = columns.pop("phase")
    if "phase" in schema:
        columns["phase"] = phase
    if "thread" in schema:
        columns["thread"] = tracks.thread[track]
    if "device" in schema and "stream" in schema and kind != "cuda_sync":
        _place_on_gpu(columns, track, tracks, strings)
    if kind in FILE_TABLES:
        _fill_times(columns, present)
    else:
        _fill_names(columns, strings)
    if kind == COUNTER:
        origin |= fill_counters(columns, origin["tid"], origin["category"], strings)
    _defaults(kind, columns, len(present))
    _by_name(kind, columns, strings, present)
    if kind == "python_function":
        _callers(columns)
    origin.update((name, columns.pop(name)) for name in list(columns) if name not in schema)
    return make_table(kind, len(present), columns, origin)


def _sampled_texts(args: AnyArray, strings: list[str], pattern: re.Pattern[str]) -> AnyArray:
    """Returns the number of each row's text of that form. Each distinct text of arguments is searched once."""
    found = np.full(len(strings) + 1, NO_STRING, np.int32)  # the last place is for rows without arguments
    numbers: dict[str, int] = {}
    for number in distinct(args[args >= 0]).tolist():
        told = pattern.search(strings[number])
        if told is not None:
            if told[1] not in numbers:
                numbers[told[1]] = len(strings)
                strings.append(told[1])
            found[number] = numbers[told[1]]
    return found[args]


def _defaults(kind: str, columns: Columns, count: int) -> None:
    """Adds the columns of arguments that no row has, filled with their defaults."""
    schema = {column.name: column.dtype for column in SCHEMAS[kind]}
    for arg in KINDS[kind]:
        if arg.default and arg.column in schema and arg.column not in columns:
            columns[arg.column] = np.full(count, arg.default).astype(schema[arg.column])


def _fill_names(columns: Columns, strings: list[str]) -> None:
    """Gives activities without a name an empty one: all code looks names up."""
    nameless = columns["name"] < 0
    if nameless.any():
        if "" not in strings:
            strings.append("")
        columns["name"][nameless] = strings.index("")


def _fill_times(columns: Columns, present: AnyArray) -> None:
    """Gives rows without a time the earliest one: they describe the whole file."""
    timed = (present & TS) != 0
    if timed.any() and not timed.all():
        columns["start"][~timed] = columns["start"][timed].min()


def _place_on_gpu(columns: Columns, track: AnyArray, tracks: ChromeTracks, strings: Sequence[str]) -> None:
    host_pids = set(tracks.pid[tracks.host].tolist())
    by_track = {"device": np.zeros(len(tracks.pid), np.uint32), "stream": tracks.thread}
    for number, pid in enumerate(tracks.pid.tolist()):
        by_track["device"][number] = 0 if pid in host_pids else _number(pid, strings) or 0
    for name, places in by_track.items():
        given = columns.get(name)
        if given is None:
            columns[name] = places[track]
            continue
        missing = np.flatnonzero(given == _UNKNOWN_DEVICE)
        given[missing] = places[track[missing]]


def _by_name(kind: str, columns: Columns, strings: Sequence[str], present: AnyArray) -> None:
    """Fills the columns whose values are only in the row's name, and marks copies between two devices."""
    if kind == "gpu_memcpy":
        keys = [arg.key for arg in KINDS[kind]]
        peer = np.uint64(1 << FIRST_ARG_BIT + keys.index("fromDevice"))
        columns["peer"] = ((present & peer) != 0).astype(np.uint8)
    if kind not in _TOLD_BY_NAME:
        return
    numbers = columns["name"]
    found = distinct(numbers[numbers >= 0]).astype(np.int64)
    for column, told in _TOLD_BY_NAME[kind].items():
        values = np.array([told(strings[number]) for number in found.tolist()], np.uint32)
        columns[column] = lookup(numbers.astype(np.uint64), found.astype(np.uint64), values, 0)


def _part(pattern: re.Pattern[str], group: int, known: Sequence[str]) -> Callable[[str], int]:
    """Returns a function that maps a name to the number of the word in this group; 0 if unknown."""

    def number(name: str) -> int:
        found = pattern.match(name)
        return known.index(found[group]) if found and found[group] in known else 0

    return number


_TOLD_BY_NAME: dict[str, dict[str, Callable[[str], int]]] = {
    "gpu_memcpy": {
        "copy_kind": _part(_MEMCPY, 1, MEMCPY_KINDS),
        "src_kind": _part(_MEMCPY, 2, MEMORY_KINDS),
        "dst_kind": _part(_MEMCPY, 3, MEMORY_KINDS),
    },
    "gpu_memset": {"memory_kind": _part(_MEMSET, 1, MEMORY_KINDS)},
    "cuda_sync": {"type": lambda name: SYNC_TYPES.index(name) if name in SYNC_TYPES else 0},
    "overhead": {"kind": lambda name: _OVERHEADS.get(name, 0)},
}


# ---- ops


def _ops(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Completes the ids and torch's thread numbers of operators and annotations."""
    if not tables:
        return {}
    given = [
        table.origin.get(OP_ID, table.origin.get("external_id", np.zeros(len(table), np.int64)))
        for table in tables.values()
    ]
    joined = np.concatenate(given)
    ids = _unique_ids(joined)
    parts = np.split(ids, np.cumsum([len(part) for part in given])[:-1])
    found = {}
    for (kind, table), own, part in zip(tables.items(), given, parts, strict=True):
        origin = dict(table.origin)
        if origin.pop(OP_ID, None) is None and ids is joined and "external_id" in origin:
            del origin["external_id"]  # it equals the column id
        backward = table["forward_thread"] > 0
        scope = np.where(backward, SCOPE_BACKWARD_FUNCTION, 0).astype(np.uint8)
        if kind == "user_annotation":
            scope = np.full(len(table), SCOPE_USER, np.uint8)
        columns = {**table.columns, "id": own if ids is joined else part, "scope": scope}
        found[kind] = Table(kind, columns, origin)
    return found


def _unique_ids(given: Ints) -> Ints:
    """Returns the given ids if all are positive and distinct; otherwise invalid and repeated ones are replaced."""
    usable = given > 0
    if usable.all() and len(distinct(given)) == len(given):
        return given
    first = np.zeros(len(given), np.bool_)
    first[np.unique(given, return_index=True)[1]] = True
    first &= usable
    ids = given.copy()
    free = int(given[first].max(initial=0)) + 1
    if free > 2**62:
        free, first = 1, np.zeros(len(given), np.bool_)
    ids[~first] = np.arange(free, free + np.count_nonzero(~first))
    return ids


def _with_torch_threads(ops: Table, flow: Table, strings: Sequence[str]) -> Table:
    """Fills in torch's own thread number of each operator, if arrows show it."""
    numbers = [number for number, text in enumerate(strings) if text in FLOW_CATEGORIES]
    arrows = np.isin(flow["category"], numbers)
    begin = np.flatnonzero(arrows & (flow["phase"] == ord("s")))
    end = np.flatnonzero(arrows & (flow["phase"] == ord("f")))
    backward = np.flatnonzero(ops["forward_thread"] > 0)
    if not len(begin) or not len(end) or not len(backward):
        return ops
    forward = lookup(_keys(flow["id"][end]), _keys(flow["id"][begin]), begin, -1)
    at_op = lookup(_moments(flow, end), _moments(ops, backward), backward, -1)
    known = (forward >= 0) & (at_op >= 0)
    torch = ops["forward_thread"][at_op[known]].astype(np.int64)
    pairs, count = np.unique(torch << 32 | flow["thread"][forward[known]], return_counts=True)
    best: dict[int, int] = {}
    for pair in pairs[np.argsort(-count, kind="stable")].tolist():
        best.setdefault(pair & 0xFFFFFFFF, pair >> 32)
    threads, places = np.unique(ops["thread"], return_inverse=True)
    column = np.array([best.get(thread, 0) for thread in threads.tolist()], np.uint32)[places]
    return ops.with_columns({"torch_thread": column})


def _keys(values: AnyArray) -> UInts64:
    return values.astype(np.int64).view(np.uint64)


def _moments(table: Table, rows: AnyArray) -> UInts64:
    """Returns a hash of thread and start for each of the rows."""
    mixed = table["thread"][rows].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys: UInts64 = mixed ^ _keys(table["start"][rows])
    return keys


# ---- Python calls


def _callers(columns: Columns) -> None:
    """Fills the columns parent and depth of Python calls."""
    if "python_id" in columns and "python_parent_id" in columns:
        ids, rows = columns["python_id"], np.arange(len(columns["python_id"]))
        parent = lookup(_keys(columns["python_parent_id"]), _keys(ids), rows, NO_ROW)
        parent[(parent == rows) | (columns["python_parent_id"] < 0)] = NO_ROW
        columns["depth"] = depths(parent)
        columns["parent"] = parent.astype(np.int32)
        return
    table = make_table("python_function", len(columns["start"]), {name: columns[name] for name in _TIMED})
    nested = nest_tables([table], int(table.end().max()))
    order = nested.order
    parent = np.empty(len(table), np.int32)
    depth = np.empty(len(table), np.int32)
    inside = nested.tree.parent
    parent[order] = np.where(inside >= 0, order[np.maximum(inside, 0)].astype(np.int32), -1)
    depth[order] = nested.tree.depth
    columns["parent"], columns["depth"] = parent, depth


_TIMED = ("start", "duration", "thread")
