"""One rank of a merge: its trace in the form of a file, and the facts needed before the first event is written."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.quantities import times
from kineto_trace.collectives.rank_clocks import Blocking, RankClock, blocking, clock_of
from kineto_trace.collectives.rank_matching import rank_collectives
from kineto_trace.errors import FileError, TraceError
from kineto_trace.formats.chrome.chrome_reader import MERGED, load_chrome
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.chrome.verbatim_writer import is_verbatim
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model import target_info
from kineto_trace.model.context import Context
from kineto_trace.model.trace import COUNTER_TABLES, DEVICE_TABLES, TEXT_ID, Table, Trace
from kineto_trace.open.trace_discovery import Source
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.open.trace_source import UNSURE
from kineto_trace.structure.event_arguments import parse

PROCESS_ROWS = ("process_name", "process_labels", "process_sort_index")
EARLIEST_NS = -(2**62)  # lower limit of times that can still be moved to 0 or later
_NS_PER_YEAR = 365 * 86400 * 10**9
_MAX_NAMED = 1 << 16  # limit of metadata rows that are read

Id = int | str  # a pid or tid as in the file


@dataclass(frozen=True, slots=True)
class TraceProcess:
    """A process of a rank, or something that the file shows as one: a GPU, or the profiler's own rows."""

    pid: Id
    name: str
    label: str
    is_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTraceFacts:
    """What a merge knows about one rank. Times are Unix ns as in the trace, not shifted yet.

    processes: the main host process first. tids: the thread numbers of all host processes.
    """

    source: Source
    rank: int
    host: str
    processes: tuple[TraceProcess, ...]
    tids: tuple[int, ...]
    earliest_ns: int
    window_ns: tuple[int, int]
    base_ns: int
    events: int
    head: Mapping[str, str]
    clock: RankClock
    blocking: Blocking | None
    notes: tuple[str, ...]


def open_rank(path: Path) -> Trace:
    """Opens the trace in the form of a Chrome trace, even if it is a capture. Raises TraceError, OSError."""
    trace = open_trace(path)
    counters = trace.table("counter")
    if is_verbatim(trace) and (counters.origin or not len(counters)):
        if MERGED in (trace.head or {}):
            raise FileError(f"{path} is already a merged trace: name the traces of the ranks")
        return trace
    target, losses, notes = trace.target, trace.losses, trace.notes
    window = trace.window_start_ns, trace.window_end_ns
    with tempfile.TemporaryFile(prefix="kineto-merge-") as file:
        with TextSink(file) as sink:
            write_chrome(trace, sink, trace_name=path.name)
        del trace  # keep one rank in memory at a time, and only one copy of it
        file.seek(0)
        loaded = load_chrome(file, name=str(path))
    return replace(
        loaded,
        target=target,
        losses=losses,
        notes=(*notes, *loaded.notes),
        window_start_ns=window[0],
        window_end_ns=window[1],
    )


def collect_facts(source: Source, *, collectives: bool) -> RankTraceFacts:
    """Collects the facts about a rank, and releases its trace again. Raises TraceError, OSError."""
    trace = open_rank(source.path)
    head = dict(trace.head or {})
    tables = [table for table in trace.tables.values() if len(table)]
    if not tables:
        raise FileError(f"{source.path} has no events")
    earliest = min(int(table["start"].min()) for table in tables)
    if earliest < EARLIEST_NS:
        raise FileError(
            f"{source.path} has an event {-earliest // _NS_PER_YEAR} years before 1970, which no merged file can hold: "
            "remove the event, or merge the other ranks without this one (--rank)"
        )
    rank = source.rank
    if source.rank_from in UNSURE and trace.target.rank is not None:
        rank = trace.target.rank
    processes = _processes(trace, tables)
    return RankTraceFacts(
        source=source,
        rank=rank,
        host=trace.target.host,
        processes=processes,
        tids=_tids(trace, tables, {process.pid for process in processes if process.is_gpu}),
        earliest_ns=earliest,
        window_ns=(trace.window_start_ns, trace.window_end_ns),
        base_ns=target_info.base_ns(head, []),
        events=sum(len(table) for table in tables),
        head=head,
        clock=clock_of(trace.target.clock_offset_ns, trace.target.clock_uncertainty_ns),
        blocking=_blocking(trace) if collectives else None,
        notes=_lost(trace),
    )


def id_of(value: int, trace: Trace) -> Id:
    """Returns a pid or tid as in the file."""
    return trace.strings[TEXT_ID - value] if value <= TEXT_ID else value


def _blocking(trace: Trace) -> Blocking:
    try:
        return blocking(rank_collectives(Context(trace)))
    except TraceError:
        return Blocking(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))


def _lost(trace: Trace) -> tuple[str, ...]:
    notes = list(trace.notes)
    if trace.losses.dropped:
        lost = times(trace.losses.dropped, "activity was", "activities were")
        notes.append(f"{lost} lost in the traced process: its buffers were full")
    return tuple(notes)


# ------------------------------------------------------------ processes and threads


def _processes(trace: Trace, tables: list[Table]) -> tuple[TraceProcess, ...]:
    """Returns all processes: the host's main one, its others, GPUs, and last those whose pid is a text."""
    gpus, seen = set[int](), set[int]()
    for table in tables:
        pids = unique_values(table.origin["pid"]).tolist()
        seen.update(pids)
        if table.kind in (*DEVICE_TABLES, *COUNTER_TABLES):
            gpus.update(pids)
    names = _process_rows(trace)

    def order(pid: int) -> tuple[bool, bool, bool, Id]:
        is_text = pid <= TEXT_ID
        place = id_of(pid, trace)
        return is_text, pid in gpus, pid != trace.target.pid, place

    found = []
    for pid in sorted(seen, key=order):
        name, label = names.get(("process_name", pid), ""), names.get(("process_labels", pid), "")
        found.append(TraceProcess(id_of(pid, trace), name, label, pid in gpus))
    return tuple(found)


def _process_rows(trace: Trace) -> dict[tuple[str, int], str]:
    """Returns (name of the row, pid) -> text of the metadata row."""
    other, found = trace.table("other"), dict[tuple[str, int], str]()
    rows = process_rows(other, trace.strings)[:_MAX_NAMED] if other.origin else []
    for row in rows:
        number = int(other.origin["args"][row])
        members = parse(trace.strings[number]) if number >= 0 else {}
        value = members.get("name", members.get("labels"))
        if isinstance(value, str):
            found[trace.strings[other["name"][row]], int(other.origin["pid"][row])] = value
    return found


def process_rows(other: Table, strings: Sequence[str]) -> list[int]:
    """Returns the rows of the table `other` that name or order processes."""
    numbers = [number for number, text in enumerate(strings) if text in PROCESS_ROWS]
    found: list[int] = np.flatnonzero((other["phase"] == ord("M")) & np.isin(other["name"], numbers)).tolist()
    return found


def _tids(trace: Trace, tables: list[Table], gpus: set[Id]) -> tuple[int, ...]:
    tids = set[int]()
    for table in tables:
        pids, place = np.unique(table.origin["pid"], return_inverse=True)
        of_gpu = np.array([id_of(pid, trace) in gpus for pid in pids.tolist()], np.bool_)[place.reshape(-1)]
        tids.update(unique_values(table.origin["tid"][~of_gpu]).tolist())
    return tuple(sorted(tid for tid in tids if tid > 0))
