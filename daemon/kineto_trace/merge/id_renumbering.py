"""Renumbers a rank's trace so that no other rank of the merge has the same ids, and moves it to the common clock.

Theory of operation
    Ids of each sort (correlation, external, flow, Python, event) are renumbered rank after rank, in the order of their
    values; values that mean "none" stay. A process gets a number derived from its rank's place. Threads keep their
    numbers unless an earlier rank has a thread with the same number. Streams keep theirs: they are threads of the
    process that stands for the GPU, which belongs to one rank only. The arguments that identify a GPU activity's place
    (device, context, stream) are unchanged.

    The result is meant for the file writers (formats/chrome/verbatim_writer.py, formats/perfetto/perfetto_writer.py):
    only what they read is changed. All times of a rank move by the same number of nanoseconds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import distinct, unique_values
from kineto_trace.errors import FileError
from kineto_trace.merge.rank_trace import Id, RankTraceFacts, TraceProcess, id_of, process_rows
from kineto_trace.model import event_kinds as bits
from kineto_trace.model.trace import OP_TABLES, ORIGIN_COLUMNS, SCHEMAS, TEXT_ID, Table, Trace

PIDS_OF_A_RANK = 1000
FIRST_FREE_TID = 1 << 22  # Linux assigns no thread ids from here on
MAX_TID = (1 << 31) - 1

AnyArray = npt.NDArray[Any]
# For each sort of ids: the columns that have them, and the smallest value that is an id.
_SORTS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "correlation": (("correlation", "wait_on_correlation"), 1),
    "external": (("external_id",), 1),
    "record_function": (("record_function_id",), 1),
    "flow": (("member_id",), TEXT_ID + 1),
    "python": (("python_id", "python_parent_id"), 0),
    "module": (("module",), 0),
    "event": (("event_index",), 0),
}


@dataclass(slots=True)
class Numbers:
    """The numbers that the ranks so far have used. pids: how many process numbers each rank reserves."""

    pids: int = PIDS_OF_A_RANK
    next_id: dict[str, int] = field(default_factory=dict)
    tids: set[int] = field(default_factory=set)
    next_tid: int = FIRST_FREE_TID


@dataclass(frozen=True, slots=True)
class Renumbered:
    """A rank's new numbers. pids: by place in RankTraceFacts.processes; tids: old -> new, for those that changed."""

    pids: tuple[int, ...]
    tids: Mapping[int, int]


def pids_of_a_rank(facts: Sequence[RankTraceFacts]) -> int:
    """Returns how many process numbers each rank reserves: a power of ten that is enough for every rank."""
    most, found = max((len(entry.processes) for entry in facts), default=0), PIDS_OF_A_RANK
    while found < most:
        found *= 10
    return found


def number(facts: RankTraceFacts, place: int, numbers: Numbers) -> Renumbered:
    """Returns the new numbers of a rank's processes and threads. place: the rank's place in the merge, from 0 on."""
    first = (place + 1) * numbers.pids
    if first + numbers.pids >= 1 << 31:
        raise FileError(f"{place + 1} ranks with {numbers.pids} processes each are more than fit into one file")
    tids = {}
    for tid in facts.tids:
        if tid in numbers.tids or tid > MAX_TID:
            while numbers.next_tid in numbers.tids:
                numbers.next_tid += 1
            tids[tid] = numbers.next_tid
        numbers.tids.add(tids.get(tid, tid))
    return Renumbered(tuple(range(first, first + len(facts.processes))), tids)


def process_name(rank: int, process: TraceProcess) -> str:
    """Returns the name that the viewer shows for a process of a rank."""
    name = process.label if process.is_gpu and process.label else process.name or process.label or str(process.pid)
    return f"rank {rank} {name}".rstrip()


def renumber(trace: Trace, facts: RankTraceFacts, new: Renumbered, numbers: Numbers, *, shift_ns: int) -> Trace:
    """Returns the trace with its new numbers, and every time `shift_ns` later."""
    work = _Work(trace, facts, new, list(trace.strings))
    ids = _new_ids(trace, numbers)
    tables = {kind: work.table(table, ids, shift_ns) for kind, table in trace.tables.items() if len(table)}
    tables["other"] = work.with_process_rows(tables.get("other"))
    return replace(
        trace,
        tables=tables,
        strings=work.strings,
        window_start_ns=trace.window_start_ns + shift_ns,
        window_end_ns=trace.window_end_ns + shift_ns,
        coverage=tuple(each.moved(shift_ns) for each in trace.coverage),
    )


# ------------------------------------------------------------ ids


@dataclass(frozen=True, slots=True)
class _Dense:
    """Old ids, ascending; the n-th one becomes first + n. least: smaller values mean "none"."""

    old: npt.NDArray[np.int64]
    first: int
    least: int

    def new(self, column: AnyArray) -> AnyArray:
        """Returns the column with the new ids, in the same type."""
        values = column.astype(np.int64)
        found = np.where(values >= self.least, np.searchsorted(self.old, values) + self.first, values)
        if column.dtype.kind in "iu" and len(self.old) and self.first + len(self.old) > np.iinfo(column.dtype).max:
            raise FileError("the ranks together have more ids than fit into one file; merge fewer of them")
        return found.astype(column.dtype)


def _new_ids(trace: Trace, numbers: Numbers) -> dict[str, _Dense]:
    """Returns the new ids of this rank for each sort."""
    values: dict[str, list[AnyArray]] = {sort: [] for sort in _SORTS}
    for table in trace.tables.values():
        for sort, _where, _name, column in _columns(table):
            values[sort].append(distinct(column.astype(np.int64)).view(np.int64))
    found = {}
    for sort, parts in values.items():
        least = _SORTS[sort][1]
        old = unique_values(np.concatenate(parts)) if parts else np.empty(0, np.int64)
        old = old[old >= least]
        first = numbers.next_id.get(sort, 1)
        numbers.next_id[sort] = first + len(old)
        found[sort] = _Dense(old, first, least)
    return found


def _columns(table: Table) -> Iterator[tuple[str, str, str, AnyArray]]:
    """Yields (sort of ids, part of the table, name, column) for all columns with ids."""
    for sort, (names, _least) in _SORTS.items():
        for name in names:
            for part, columns in (("columns", table.columns), ("origin", table.origin)):
                if name in columns:
                    yield sort, part, name, columns[name]
    if table.kind == "flow":
        yield "flow", "columns", "id", table.columns["id"]
    elif table.kind in OP_TABLES:
        yield "external", "columns", "id", table.columns["id"]


# ------------------------------------------------------------ rows


@dataclass(slots=True)
class _Work:
    trace: Trace
    facts: RankTraceFacts
    new: Renumbered
    strings: list[str]

    def table(self, table: Table, ids: Mapping[str, _Dense], shift_ns: int) -> Table:
        """Returns one table with its new numbers and times."""
        parts = {"columns": dict(table.columns), "origin": dict(table.origin)}
        for sort, part, name, column in _columns(table):
            parts[part][name] = self._text_ids(ids[sort].new(column))
        columns, origin = parts["columns"], parts["origin"]
        columns["start"] = columns["start"] + np.int64(shift_ns)
        if "queued" in columns:
            queued = columns["queued"]
            columns["queued"] = np.where(queued > 0, queued.astype(np.int64) + shift_ns, 0).astype(queued.dtype)
        origin["pid"], origin["tid"] = self._places(table)
        present = origin["present"] & np.uint64(~(bits.PID_TEXT | bits.TS_REAL | bits.TS_INTEGER) & (1 << 64) - 1)
        origin["present"] = present | np.uint64(bits.PID)
        return Table(table.kind, columns, origin)

    def _text_ids(self, column: AnyArray) -> AnyArray:
        """Appends the rank to ids that are texts."""
        if column.dtype != np.int64 or not (column <= TEXT_ID).any():
            return column
        old, place = np.unique(column, return_inverse=True)
        new = [self._add(f"{id_of(value, self.trace)} rank {self.facts.rank}") if value <= TEXT_ID else value
               for value in old.tolist()]  # fmt: skip
        found: AnyArray = np.array(new, np.int64)[place.reshape(-1)]
        return found

    def _add(self, text: str) -> int:
        self.strings.append(text)
        return TEXT_ID - (len(self.strings) - 1)

    def _places(self, table: Table) -> tuple[AnyArray, AnyArray]:
        """Returns the new pid and tid of each row."""
        by_id: dict[Id, tuple[int, TraceProcess]] = {
            process.pid: (pid, process) for pid, process in zip(self.new.pids, self.facts.processes, strict=True)
        }
        old, place = np.unique(table.origin["pid"], return_inverse=True)
        place = place.reshape(-1)
        entries = [by_id[id_of(pid, self.trace)] for pid in old.tolist()]
        pid = np.array([entry[0] for entry in entries], np.int64)[place]
        host = np.array([not entry[1].is_gpu for entry in entries], np.bool_)[place]
        tids, where = np.unique(table.origin["tid"], return_inverse=True)
        changed = np.array([self.new.tids.get(tid, tid) for tid in tids.tolist()], np.int64)[where.reshape(-1)]
        return pid, np.where(host, changed, table.origin["tid"])

    def with_process_rows(self, other: Table | None) -> Table:
        """Replaces the rows that name and order the processes by new ones."""
        rows: list[tuple[int, str, dict[str, object]]] = []
        for pid, process in zip(self.new.pids, self.facts.processes, strict=True):
            rows.append((pid, "process_name", {"name": process_name(self.facts.rank, process)}))
            if process.label and not process.is_gpu:
                rows.append((pid, "process_labels", {"labels": process.label}))
            rows.append((pid, "process_sort_index", {"sort_index": pid}))
        kept = None
        if other is not None:
            mask = np.ones(len(other), np.bool_)
            mask[process_rows(other, self.strings)] = False
            kept = other.take(mask)
        return self._joined(kept, rows)

    def _joined(self, other: Table | None, rows: list[tuple[int, str, dict[str, object]]]) -> Table:
        """Returns the table with these rows before its own."""
        texts = [len(self.strings) + place for place in range(2 * len(rows))]
        for _pid, name, args in rows:
            self.strings += [name, json.dumps(args, ensure_ascii=False, separators=(",", ":"))[1:-1]]
        count = len(rows)
        start = 0 if other is None or not len(other) else int(other["start"].min())
        made = {
            "start": np.full(count, start),
            "name": np.array(texts[::2]),
            "category": np.full(count, -1),
            "phase": np.full(count, ord("M")),
            "pid": np.array([pid for pid, _name, _args in rows]),
            "args": np.array(texts[1::2]),
            "members": np.full(count, -1),
            "present": np.full(count, bits.PHASE | bits.NAME | bits.PID | bits.TID | bits.ARGS),
        }
        empty = Table("other", *_nothing()) if other is None else other
        parts = []
        for part in (empty.columns, empty.origin):
            joined = {}
            for name, column in part.items():
                values = made.get(name, np.zeros(count, np.int64)).astype(column.dtype)
                joined[name] = np.concatenate([values, column])
            parts.append(joined)
        columns, origin = parts
        return Table("other", columns, origin)


def _nothing() -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
    columns = {column.name: np.empty(0, column.dtype) for column in SCHEMAS["other"]}
    return columns, {column.name: np.empty(0, column.dtype) for column in ORIGIN_COLUMNS}
