"""The windows of a capture, by iterations or by time, and the table rows in them.

Theory of operation
    The agent records when each iteration began ("step_marks/1"); iteration N lasts until N + 1 begins. Iterations are
    clipped to the window. Readers (HTA, TensorBoard) find the iterations by these names, which torch.profiler uses too.

    An iteration that had begun before the window, or had not ended in it, has the argument INCOMPLETE; one that had not
    ended is not `finished` either.

    An iteration begins inside the hook that noticed it, often a few microseconds before the end of an annotation such
    as "Optimizer.step#SGD.step". Rows of one thread must nest, so a border moves to the end of those ops of the
    previous iteration that it cuts.

    If the program's own profiler wrote "ProfilerStep#" annotations into this trace, only those are kept. Those that the
    window cuts have the argument as well.

    N is the agent's count, however the program numbers its steps, so that it means the same in every capture, in lists
    and in requests. An annotation of JAX with a number of the program's keeps it as the argument STEP_NUMBER. Only if
    the agent counted nothing in the window are these annotations the iterations; then a warning says so.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from kineto_agent.protocol.records import STEP_MARK_FIELDS, STEP_MARKS_FORMAT

from kineto_trace.arrays.id_sets import is_in, unique_values
from kineto_trace.base.array_types import Flags, Ints, UInts32
from kineto_trace.decode.activity_names import ACTIVITY_BUFFER_REQUEST
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, StepMarks, fixed_records, record_dtype
from kineto_trace.model.activity_tables import STEP_NUMBER, STEP_PREFIX, ViewerRow
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import (
    API_TABLES,
    COUNTER_TABLES,
    GPU_TABLES,
    NO_ROW,
    NO_SEQUENCE,
    NO_STRING,
    OP_TABLES,
    UNTIMED_TABLES,
    StringTable,
    Table,
    make_table,
    own_tables,
)
from kineto_trace.spool.raw_records import RawSource

FORMAT = STEP_MARKS_FORMAT
COMPLETE = "complete"
INCOMPLETE = f'"{COMPLETE}":false'
BY_PROGRAM = f"iteration numbers ({STEP_NUMBER}) come from the program; the agent did not count them"
_NUMBERED_ARGUMENT = re.compile(rf'"{STEP_NUMBER}":(\d{{1,16}})')
_NUMBERED_RANGE = re.compile(rf"{STEP_NUMBER} (\d{{1,16}})$")
_MARK = record_dtype(STEP_MARK_FIELDS)
_SCOPE_USER = 7
_MAX_NUMBER = 2**53  # larger numbers are not counts, and JSON readers would round them


@dataclass(frozen=True, slots=True)
class _Rows:
    """Iterations in the window, clipped to it. begun, ended: in the window."""

    number: Ints
    start: Ints
    end: Ints
    thread: Ints
    begun: Flags
    ended: Flags

    def __len__(self) -> int:
        return len(self.number)


def decode(source: RawSource, _strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all records into step marks; there are no tables. Implausible records count as undecoded."""
    records, cut = fixed_records(source, _MARK)
    marks = _plausible(*(records[name].astype(np.int64) for name in ("number", "time", "thread")))
    undecoded = cut + len(records) - len(marks.number)
    return Decoded(tables={}, records=len(records), undecoded=undecoded, step_marks=marks)


def reported_marks(target: TargetInfo) -> StepMarks:
    """Returns the marks that agents before the format step_marks/1 reported at the end."""
    entries = [entry for entry in target.iterations if _is_iteration(entry)]
    number, start = np.array(entries, np.int64).reshape(-1, 2).T
    return _plausible(number, start, np.full(len(entries), target.iteration_thread))


def _plausible(number: Ints, start: Ints, thread: Ints) -> StepMarks:
    """Returns the plausible marks that a target reported: numbers and times ascend."""
    known = (number >= 0) & (number < _MAX_NUMBER) & (start > 0) & (thread > 0)
    number, start, thread = number[known], start[known], thread[known]
    later = np.ones(len(number), np.bool_)
    if len(number):
        later[1:] = number[1:] > np.maximum.accumulate(number)[:-1]
        later[1:] &= start[1:] >= np.maximum.accumulate(start)[:-1]
    return StepMarks(number[later], start[later], thread[later])


def add_iterations(
    tables: Mapping[str, Table], strings: StringTable, marks: StepMarks, window: tuple[int, int]
) -> dict[str, Table]:
    """Adds a user_annotation for each iteration that overlaps the window (Unix ns, [start, end)).

    The tables must already be clipped to the window.
    """
    own = _own(tables, strings)
    if any(len(rows) for rows in own.values()):
        return {**tables, **{kind: _marked(tables[kind], rows, strings, window) for kind, rows in own.items()}}
    rows = _rows(marks, *window)
    if not len(rows):
        return dict(tables)
    start, end = _nested(tables, rows)
    texts = np.array([NO_STRING, NO_STRING])
    if not (rows.begun & rows.ended).all():
        texts[1] = strings.add(INCOMPLETE)
    added = make_table(
        "user_annotation",
        len(rows),
        {
            "start": start,
            "duration": end - start,
            "name": strings.add_all([f"{STEP_PREFIX}{number}" for number in rows.number.tolist()]),
            "thread": rows.thread,
            "id": np.arange(len(rows)) + _first_free_id(tables),
            "sequence": np.full(len(rows), NO_SEQUENCE),
            "torch_thread": _torch_threads(tables, rows.thread),
            "scope": np.full(len(rows), _SCOPE_USER),
            "finished": rows.ended,
            "inputs": texts[(~(rows.begun & rows.ended)).astype(np.int64)],
        },
    )
    before = tables.get("user_annotation")
    return {**tables, "user_annotation": added if before is None else _joined(before, added)}


def has_counted(marks: StepMarks, window: tuple[int, int]) -> bool:
    """Returns whether the agent has counted iterations that overlap the window."""
    return len(_rows(marks, *window)) > 0


def with_program_steps(tables: Mapping[str, Table], strings: StringTable) -> dict[str, Table] | None:
    """Returns the tables with the program's numbered steps as iterations; None if there are none.

    On the host they are annotations with the argument STEP_NUMBER, on devices ranges of that name and number.
    """
    renamed = {}
    for kind, column, pattern in (
        ("user_annotation", "inputs", _NUMBERED_ARGUMENT),
        ("gpu_user_annotation", "name", _NUMBERED_RANGE),
    ):
        table = tables.get(kind)
        if table is not None and (name := _step_names(table, column, pattern, strings)) is not None:
            renamed[kind] = table.with_columns({"name": name})
    return {**tables, **renamed} if renamed else None


def _step_names(table: Table, column: str, pattern: re.Pattern[str], strings: StringTable) -> Ints | None:
    """Returns the names of all rows, with those of iterations for rows whose text in this column has a number."""
    texts = unique_values(table[column])
    matches = ((text, pattern.match(strings.strings[text])) for text in texts[texts != NO_STRING].tolist())
    numbers = {text: match[1] for text, match in matches if match is not None}
    if not numbers:
        return None
    rows = np.flatnonzero(np.isin(table[column], list(numbers)))
    names = table["name"].copy()
    names[rows] = strings.add_all([f"{STEP_PREFIX}{numbers[text]}" for text in table[column][rows].tolist()])
    return names


def _rows(marks: StepMarks, first_ns: int, last_ns: int) -> _Rows:
    """Returns the iterations that overlap the window, without those whose successors are unknown."""
    following = np.append(marks.start[1:], np.iinfo(np.int64).max)[: len(marks.number)]
    known = np.append(np.diff(marks.number) == 1, True)[: len(marks.number)]
    ended = following <= last_ns
    start, end = np.maximum(marks.start, first_ns), np.where(ended, following, last_ns)
    chosen = known & (start < end)
    return _Rows(
        marks.number[chosen],
        start[chosen],
        end[chosen],
        marks.thread[chosen],
        (marks.start >= first_ns)[chosen],
        ended[chosen],
    )


def _is_iteration(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(value, int) for value in entry)
        and all(0 <= value < 2**63 for value in entry)
    )


def _own(tables: Mapping[str, Table], strings: StringTable) -> dict[str, Ints]:
    """Returns the rows of the steps that the program's own profiler has written, by table."""
    numbers = [number for number, text in enumerate(strings.strings) if text.startswith(STEP_PREFIX)]
    if not numbers:
        return {}
    return {kind: np.flatnonzero(np.isin(tables[kind]["name"], numbers)) for kind in OP_TABLES if kind in tables}


def _marked(table: Table, rows: Ints, strings: StringTable, window: tuple[int, int]) -> Table:
    """Returns the table with the argument INCOMPLETE in those of the rows that the window cuts."""
    cut = rows[(table["start"][rows] < window[0]) | (table.end()[rows] > window[1])]
    if not len(cut):
        return table
    inputs = table["inputs"].copy()
    texts = [strings.strings[number] + "," if number != NO_STRING else "" for number in inputs[cut].tolist()]
    inputs[cut] = strings.add_all([text + INCOMPLETE for text in texts])
    return table.with_columns({"inputs": inputs})


def _first_free_id(tables: Mapping[str, Table]) -> int:
    return 1 + max(
        (int(tables[kind]["id"].max()) for kind in OP_TABLES if kind in tables and len(tables[kind])), default=0
    )


def _torch_threads(tables: Mapping[str, Table], thread: Ints) -> Ints:
    """Returns torch's number of each of these threads if an op states it, otherwise 0."""
    found = np.zeros(len(thread), np.int64)
    for number in unique_values(thread).tolist():
        for kind in reversed(OP_TABLES):
            if kind in tables and (own := tables[kind]["thread"] == number).any():
                found[thread == number] = int(tables[kind]["torch_thread"][own].max())
    return found


def _nested(tables: Mapping[str, Table], rows: _Rows) -> tuple[Ints, Ints]:
    """Returns start and end of each row, moved to the end of the ops that they cut (see above)."""
    start, end = rows.start.copy(), rows.end.copy()
    for thread in unique_values(rows.thread).tolist():
        own = np.flatnonzero(rows.thread == thread)
        low, high = _ops_across(tables, thread, unique_values([rows.start[own], rows.end[own]]))
        first, last = rows.start[own], rows.end[own]
        limit = np.append(last[1:], np.iinfo(np.int64).max)  # a border never passes the end of the next iteration
        at = np.searchsorted(first, high) - 1  # the last start that an op cuts: that op contains rows before it
        cuts = (at >= 0) & (low < first[at]) & (high < last[at])
        np.maximum.at(start, own[at[cuts]], high[cuts])
        at = np.searchsorted(last, high) - 1
        cuts = (at >= 0) & (low >= first[at]) & (low < last[at]) & (high < limit[at])
        np.maximum.at(end, own[at[cuts]], high[cuts])
    return start, end


def _ops_across(tables: Mapping[str, Table], thread: int, borders: Ints) -> tuple[Ints, Ints]:
    """Returns starts and ends of the thread's ops that contain one of the borders."""
    found = [np.empty((2, 0), np.int64)]
    for kind in OP_TABLES:
        if kind in tables:
            table = tables[kind]
            mine = np.flatnonzero(table["thread"] == thread)
            start, end = table["start"][mine], table["start"][mine] + table["duration"][mine]
            across = np.searchsorted(borders, start, "right") < np.searchsorted(borders, end, "left")
            found.append(np.stack([start[across], end[across]]))
    low, high = np.concatenate(found, axis=1)
    return low, high


def _joined(before: Table, added: Table) -> Table:
    return Table(
        before.kind, {name: np.concatenate([column, added.columns[name]]) for name, column in before.columns.items()}
    )


def apply_window(tables: Mapping[str, Table], start_ns: int, end_ns: int) -> tuple[dict[str, Table], int]:
    """Returns the rows that overlap the window, and the number of the other rows.

    A runtime or driver call outside the window stays if it caused a GPU activity that is kept, so that every flow has
    both ends; an op or annotation outside stays if such a call lies in it, so that every GPU activity has the op that
    caused it. Tensors stay with their op; other tables without times stay as they are.
    """
    timed = {kind: table for kind, table in tables.items() if kind not in UNTIMED_TABLES}
    kept = {kind: _overlapping(timed[kind], start_ns, end_ns) for kind in timed}
    correlations: UInts32 | None = None
    for kind in API_TABLES:
        if kind in tables and not kept[kind].all():
            if correlations is None:
                correlations = _correlations(tables, kept)
            outside = np.flatnonzero(~kept[kind])
            kept[kind][outside] = is_in(tables[kind]["correlation"][outside], correlations)
    _keep_enclosing(tables, kept, start_ns)
    result = {kind: table if kept[kind].all() else _take(table, kept[kind]) for kind, table in timed.items()}
    outside_count = sum(int(np.count_nonzero(~mask)) for mask in kept.values())
    untimed = {kind: table for kind, table in tables.items() if kind in UNTIMED_TABLES}
    return {**result, **untimed, **_tensors(tables, result)}, outside_count


def _overlapping(table: Table, start_ns: int, end_ns: int) -> Flags:
    mask: Flags = (table["start"] < end_ns) & (table.end() >= start_ns) & (table["start"] > 0)
    return mask


def _correlations(tables: Mapping[str, Table], kept: Mapping[str, Flags]) -> UInts32:
    work = [kind for kind in (*GPU_TABLES, *own_tables(tables, ViewerRow.GPU)) if kind in tables]
    found = np.concatenate([np.empty(0, np.uint32), *(tables[kind]["correlation"][kept[kind]] for kind in work)])
    known: UInts32 = found[found != 0]
    return known


def _keep_enclosing(tables: Mapping[str, Table], kept: Mapping[str, Flags], start_ns: int) -> None:
    """Keeps ops before the window in which a kept call began."""
    calls = [
        (table["thread"][early], table["start"][early])
        for table, early in (
            (tables[kind], kept[kind] & (tables[kind]["start"] < start_ns)) for kind in API_TABLES if kind in tables
        )
    ]
    threads = np.concatenate([thread for thread, _ in calls]) if calls else np.empty(0, np.uint32)
    starts = np.concatenate([start for _, start in calls]) if calls else np.empty(0, np.int64)
    for thread in unique_values(threads).tolist():
        times = np.sort(starts[threads == thread])
        for kind in OP_TABLES:
            if kind in tables:
                rows = np.flatnonzero(~kept[kind] & (tables[kind]["thread"] == thread))
                first = np.searchsorted(times, tables[kind]["start"][rows], "left")
                kept[kind][rows] = np.searchsorted(times, tables[kind].end()[rows], "right") > first


def _take(table: Table, kept: Flags) -> Table:
    """Selects rows and renumbers parents that are row numbers."""
    taken = table.take(kept)
    if "parent" not in taken.columns or table.declared is not None:
        return taken
    place = np.where(kept, np.cumsum(kept) - 1, NO_ROW)
    parent = taken["parent"]
    moved = np.where(parent >= 0, place[np.maximum(parent, 0)], NO_ROW)
    return taken.with_columns({"parent": moved.astype(parent.dtype)})


def _tensors(tables: Mapping[str, Table], kept: Mapping[str, Table]) -> dict[str, Table]:
    """Selects the tensors of the remaining ops."""
    table = tables.get("op_tensor")
    if table is None:
        return {}
    ops = [kept[kind]["id"] for kind in OP_TABLES if kind in kept]
    stay = (
        is_in(table["op"].view(np.uint64), np.concatenate(ops).view(np.uint64)) if ops else np.zeros(len(table), bool)
    )
    return {table.kind: table if stay.all() else table.take(stay)}


def whole_extent(tables: Mapping[str, Table]) -> tuple[int, int]:
    """Returns the first start and the last end of all activities (Unix ns); (0, 0) if there are none."""
    filled = [table for table in _activities(tables) if len(table)]
    if not filled:
        return 0, 0
    starts = [table["start"][table["start"] > 0] for table in filled]
    first = min((int(column.min()) for column in starts if len(column)), default=0)
    return first, max(int(table.end().max()) for table in filled) + 1


def drop_trailing_requests(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Removes CUPTI's last "Activity Buffer Request" if it began after all other rows: our own flush caused it."""
    overhead = tables.get("overhead")
    if overhead is None or not len(overhead):
        return dict(tables)
    others = [int(table.end().max()) for table in _activities(tables) if table.kind != "overhead" and len(table)]
    trailing = (overhead["kind"] == ACTIVITY_BUFFER_REQUEST) & (overhead["start"] > max(others, default=0))
    return {**tables, "overhead": overhead.take(~trailing)}


def _activities(tables: Mapping[str, Table]) -> list[Table]:
    return [table for kind, table in tables.items() if kind not in (*UNTIMED_TABLES, *COUNTER_TABLES)]
