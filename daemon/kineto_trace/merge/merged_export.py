"""Writes the traces of several ranks into one file.

    merge_traces(find_traces("job/"), Path("job.pftrace"))

Theory of operation
    Every trace is opened twice, one trace at a time, so that memory does not grow with the number of ranks. The first
    pass collects its processes, clock and collectives; the second one writes it with its new numbers
    (id_renumbering.py) and on the common clock (rank_clocks.py), through the writers that also write single traces.
    Ranks are written in ascending order. The same traces give the same bytes.

    The file describes its ranks in the member kinetodMerge, which is part of a Chrome trace and of the head that a
    Perfetto trace has in its metadata.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from kineto_agent import __version__

from kineto_trace.arrays.id_sets import distinct, unique_values
from kineto_trace.base.array_types import AnyArray, Ints
from kineto_trace.base.atomic_files import atomic_file
from kineto_trace.collectives.rank_clocks import Alignment, RankClock, align, to_dict
from kineto_trace.errors import FileError, FormatError
from kineto_trace.formats.chrome.chrome_reader import MERGED
from kineto_trace.formats.chrome.verbatim_writer import begin_file, end_file, write_events
from kineto_trace.formats.perfetto.perfetto_writer import FIRST_SEQUENCE, append_perfetto
from kineto_trace.formats.text_sinks import GzipSink, TextSink
from kineto_trace.formats.trace_export import Exported, format_of
from kineto_trace.merge.rank_trace import (
    Id,
    RankTraceFacts,
    TraceProcess,
    collect_facts,
    id_of,
    open_rank,
    process_rows,
)
from kineto_trace.model import activity_tables as bits
from kineto_trace.model.trace import OP_TABLES, ORIGIN_COLUMNS, TEXT_ID, Table, Trace, make_table
from kineto_trace.open.trace_discovery import Source, capture_notes
from kineto_trace.open.trace_source import UNSURE

_BASE = "baseTimeNanoseconds"
EARLIEST_UNIX_NS = 1 << 59  # in April 1988; smaller times are not relative to the Unix epoch
_OF_ALL = ("schemaVersion", "displayTimeUnit")  # members of the first rank's head that also hold for the merged file
_OF_EQUALS = ("deviceProperties",)  # members that hold for the merged file only if all ranks have the same
PIDS_OF_A_RANK = 1000
FIRST_FREE_TID = 1 << 22  # Linux assigns no thread ids from here on
MAX_TID = (1 << 31) - 1

# For each kind of ids: the columns that have them, and the smallest valid id.
_SORTS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "correlation": (("correlation", "wait_on_correlation"), 1),
    "external": (("external_id",), 1),
    "record_function": (("record_function_id",), 1),
    "flow": (("member_id",), TEXT_ID + 1),
    "python": (("python_id", "python_parent_id"), 0),
    "module": (("module",), 0),
    "event": (("event_index",), 0),
}


# Renumbers a rank's trace so that no other rank of the merge has the same ids, and moves it to the common clock.
# Theory of operation
# Ids of each kind (correlation, external, flow, Python, event) are renumbered rank after rank, in the order of their
# values; values that mean "none" stay. A process gets a number derived from its rank's place. Threads keep their
# numbers unless an earlier rank has a thread with the same number. Streams keep theirs: they are threads of the process
# that represents the GPU, which belongs to one rank only. The arguments that identify a GPU activity's place (device,
# context, stream) are unchanged.
# The result is meant for the file writers (formats/chrome/verbatim_writer.py, formats/perfetto/perfetto_writer.py):
# only the data that they read are changed. All times of a rank move by the same number of nanoseconds.
@dataclass(slots=True)
class Numbers:
    """The numbers used by the ranks so far. pids: how many process numbers each rank reserves."""

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
        raise FileError(f"{place + 1} ranks with {numbers.pids} processes each do not fit into one file")
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

    old: Ints
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
        nothing = {column.name: np.empty(0, column.dtype) for column in ORIGIN_COLUMNS}
        empty = make_table("other", 0, {}, nothing) if other is None else other
        parts = []
        for part in (empty.columns, empty.origin):
            joined = {}
            for name, column in part.items():
                values = made.get(name, np.zeros(count, np.int64)).astype(column.dtype)
                joined[name] = np.concatenate([values, column])
            parts.append(joined)
        columns, origin = parts
        return Table("other", columns, origin)


@dataclass(frozen=True, slots=True)
class MergedTrace:
    """The result of a merge. ranks: in ascending order; alignment: of their clocks, in the same order."""

    written: Exported
    ranks: tuple[int, ...]
    alignment: Alignment

    @property
    def reference_rank(self) -> int:
        """The rank whose clock the others follow."""
        return self.ranks[self.alignment.reference]

    def clocks(self) -> list[dict[str, Any]]:
        """Returns what the file states about each rank's clock."""
        return [{"rank": rank, **to_dict(clock)} for rank, clock in zip(self.ranks, self.alignment.clocks, strict=True)]


@dataclass(frozen=True, slots=True)
class Merge:
    """Everything that is known before the first event is written. shift_ns: added to each rank's times."""

    facts: tuple[RankTraceFacts, ...]
    alignment: Alignment
    new: tuple[Renumbered, ...]
    pids: int
    shift_ns: tuple[int, ...]
    base_ns: int
    head: Mapping[str, str]

    @property
    def window_ns(self) -> tuple[int, int]:
        """Returns the window from the first rank's beginning to the last rank's end."""
        windows = [
            tuple(time + shift for time in fact.window_ns)
            for fact, shift in zip(self.facts, self.shift_ns, strict=True)
        ]
        return min(window[0] for window in windows), max(window[1] for window in windows)


def merge_traces(
    sources: Sequence[Source],
    path: Path,
    format_name: str = "",
    *,
    ranks: Collection[int] | None = None,
    clocks: Mapping[int, RankClock] | None = None,
    refine: bool = True,
) -> MergedTrace:
    """Writes the traces into one file, in this format or, by default, in the one of the suffix of `path`.

    ranks: the ranks to include; None includes all.
    clocks: replace those stated in the traces.
    refine: use collectives to refine the clocks.

    Raises FormatError for a format that holds a single rank, FileError for a path that is not a trace or a rank without
    one, OSError if the path cannot be written.
    """
    name = format_name or format_of(path)
    if name not in FORMATS:
        raise FormatError(f"traces of several ranks cannot be merged as {name!r}; supported: {', '.join(FORMATS)}")
    facts = _facts(sources, ranks, refine=refine)
    merge = plan(facts, clocks=clocks or {}, refine=refine, name=path.name)
    with atomic_file(path) as file:
        sink_type, write = FORMATS[name]
        with sink_type(file) as sink:
            notes = write(merge, sink)
        size = file.tell()
    read = [f"rank {fact.rank}: {note}" for fact in merge.facts for note in fact.notes]
    notes = list(dict.fromkeys((*capture_notes(sources), *read, *merge.alignment.notes, *notes)))
    return MergedTrace(Exported(path, size, tuple(notes)), tuple(fact.rank for fact in merge.facts), merge.alignment)


def _facts(sources: Sequence[Source], ranks: Collection[int] | None, *, refine: bool) -> list[RankTraceFacts]:
    """Returns the facts of the wanted traces, sorted by rank."""

    def wanted(rank: int) -> bool:
        return ranks is None or rank in ranks

    facts = []
    for source in sources:
        may_differ = source.rank_from in UNSURE  # the opened trace may state another rank
        if may_differ or wanted(source.rank):
            found = collect_facts(source, collectives=refine)
            if wanted(found.rank):
                facts.append(found)
    missing = sorted(set(ranks or ()) - {fact.rank for fact in facts})
    if missing:
        raise FileError(f"there is no trace of rank {', '.join(map(str, missing[:8]))}")
    if not facts:
        raise FileError("no trace was given: name at least one")
    return sorted(facts, key=lambda fact: fact.rank)


def plan(facts: Sequence[RankTraceFacts], *, clocks: Mapping[int, RankClock], refine: bool, name: str) -> Merge:
    """Combines what is known about all ranks. Raises FileError."""
    ranks = [fact.rank for fact in facts]
    _check(facts, clocks)
    own = [clocks.get(fact.rank, fact.clock) for fact in facts]
    found = [fact.blocking for fact in facts if fact.blocking is not None]
    alignment = align(ranks, own, found if refine else None, [fact.host for fact in facts])
    offsets = [clock.offset_ns for clock in alignment.clocks]
    earliest = min(fact.earliest_ns + offset for fact, offset in zip(facts, offsets, strict=True))
    later = max(0, -earliest)  # no format supports times before 0
    pids = pids_of_a_rank(facts)
    numbers = Numbers(pids)
    new = tuple(number(fact, place, numbers) for place, fact in enumerate(facts))
    bases = [fact.base_ns for fact in facts]
    base = min(bases) if min(bases) <= earliest + later else 0
    merge = Merge(
        tuple(replace(fact, blocking=None) for fact in facts),
        alignment,
        new,
        pids,
        tuple(offset + later for offset in offsets),
        base,
        {},
    )
    return replace(merge, head=_head(merge, later, name))


def _check(facts: Sequence[RankTraceFacts], clocks: Mapping[int, RankClock]) -> None:
    """Checks that each rank appears once, and that clocks are given for these ranks only."""
    places: dict[int, Path] = {}
    for fact in facts:
        if fact.rank in places:
            raise FileError(
                f"rank {fact.rank} is in two traces, {places[fact.rank]} and {fact.source.path}: use only one"
            )
        places[fact.rank] = fact.source.path
    unknown = sorted(set(clocks) - set(places))
    if unknown:
        raise FileError(f"there is an offset for rank {unknown[0]}, but no trace")
    based = [fact for fact in facts if fact.base_ns]
    absolute = [fact for fact in facts if fact.window_ns[0] >= EARLIEST_UNIX_NS]
    if len(absolute) not in (0, len(facts)) and len(based) not in (0, len(facts)):
        odd = next(fact for fact in facts if fact not in absolute)
        raise FileError(
            f"{odd.source.path} does not state when it was recorded ({_BASE}), so it cannot be merged with others"
        )


# ------------------------------------------------------------ the file's description of itself


def _head(merge: Merge, later_ns: int, name: str) -> dict[str, str]:
    first = merge.facts[0].head
    head = {key: first[key] for key in _OF_ALL if key in first}
    for key in _OF_EQUALS:
        if key in first and all(fact.head.get(key) == first[key] for fact in merge.facts):
            head[key] = first[key]
    head[MERGED] = _json(
        {
            "version": __version__,
            "reference_rank": merge.facts[merge.alignment.reference].rank,
            "clock_uncertainty_ns": merge.alignment.uncertainty_ns,
            "later_ns": later_ns,
            "ranks": [_about(*each) for each in zip(merge.facts, merge.alignment.clocks, merge.new, strict=True)],
        }
    )
    head[_BASE] = str(merge.base_ns)
    head["traceName"] = _json(name)
    return head


def _about(fact: RankTraceFacts, clock: RankClock, new: Renumbered) -> dict[str, Any]:
    """Describes one rank. pids and tids: new number -> number in the rank's own trace."""
    return {
        "rank": fact.rank,
        "host": fact.host,
        "trace": fact.source.path.name,
        "pids": {str(pid): process.pid for pid, process in zip(new.pids, fact.processes, strict=True)},
        "tids": {str(tid): old for old, tid in sorted(new.tids.items())},
        **to_dict(clock),
    }


def _json(value: object) -> str:
    return json.dumps(value, separators=(", ", ": "))


# ------------------------------------------------------------ writing


def _ranks(merge: Merge, write: Callable[[Trace, bool], None]) -> None:
    """Calls `write` with each rank's trace as the file contains it, and whether it is the first."""
    numbers = Numbers(merge.pids)
    start, end = merge.window_ns
    for place, (fact, new) in enumerate(zip(merge.facts, merge.new, strict=True)):
        trace = renumber(open_rank(fact.source.path), fact, new, numbers, shift_ns=merge.shift_ns[place])
        target = replace(trace.target, rank=fact.rank, pid=new.pids[0])
        head = merge.head if place == 0 else {_BASE: merge.head[_BASE]}
        write(replace(trace, target=target, head=head, window_start_ns=start, window_end_ns=end), place == 0)
        del trace


def _chrome(merge: Merge, sink: TextSink) -> list[str]:
    def write(trace: Trace, is_first: bool) -> None:
        if not is_first:
            sink.text(b",\n")
        write_events(trace, merge.base_ns, sink)

    begin_file(merge.head, sink)
    _ranks(merge, write)
    end_file(merge.head, sink)
    return []


def _perfetto(merge: Merge, sink: TextSink) -> list[str]:
    notes: list[str] = []
    sequence = FIRST_SEQUENCE

    def write(trace: Trace, _is_first: bool) -> None:
        nonlocal sequence
        done = append_perfetto(trace, sink, sequence)
        sequence = done.sequence
        notes.extend(f"rank {trace.target.rank}: {note}" for note in done.notes)

    _ranks(merge, write)
    return notes


FORMATS: Mapping[str, tuple[type[TextSink], Callable[[Merge, TextSink], list[str]]]] = {
    "chrome": (GzipSink, _chrome),
    "chrome-json": (TextSink, _chrome),
    "perfetto": (TextSink, _perfetto),
}
