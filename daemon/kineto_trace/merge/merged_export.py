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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kineto_agent import __version__

from kineto_trace.base.atomic_files import atomic_file
from kineto_trace.collectives.rank_clocks import Alignment, RankClock, align, to_dict
from kineto_trace.errors import FileError, FormatError
from kineto_trace.formats.chrome.chrome_reader import MERGED
from kineto_trace.formats.chrome.verbatim_writer import begin_file, end_file, write_events
from kineto_trace.formats.perfetto.perfetto_writer import FIRST_SEQUENCE, append_perfetto
from kineto_trace.formats.shared.text_sinks import GzipSink, TextSink
from kineto_trace.formats.trace_export import Written, format_of
from kineto_trace.merge.id_renumbering import Numbers, Renumbered, number, pids_of_a_rank, renumber
from kineto_trace.merge.rank_trace import RankTraceFacts, look_at, open_rank
from kineto_trace.model.trace import Trace
from kineto_trace.open.capture_choice import capture_notes
from kineto_trace.open.trace_discovery import Source

_BASE = "baseTimeNanoseconds"
EARLIEST_UNIX_NS = 1 << 59  # in April 1988; smaller times are not relative to the Unix epoch
_OF_ALL = ("schemaVersion", "displayTimeUnit")  # members of the first rank's head that also hold for the merged file
_OF_EQUALS = ("deviceProperties",)  # members that hold for the merged file only if all ranks have the same


@dataclass(frozen=True, slots=True)
class MergedTrace:
    """The result of a merge. ranks: in ascending order; alignment: of their clocks, in the same order."""

    written: Written
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
    """Everything that is known before the first event is written. shift_ns: what is added to each rank's times."""

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
    """Writes the traces into one file, in this format or, by default, in the one that the suffix of `path` stands for.

    ranks: the ranks to include; None includes all. clocks: replace those stated in the traces. refine: use collectives
    to refine the clocks. Raises FormatError for a format that holds a single rank, FileError for a path that is not a
    trace or a rank without one, OSError if the path cannot be written.
    """
    name = format_name or format_of(path)
    if name not in FORMATS:
        raise FormatError(f"traces of several ranks cannot be merged as {name!r}; they can as: {', '.join(FORMATS)}")
    facts = _facts(sources, ranks, refine=refine)
    merge = plan(facts, clocks=clocks or {}, refine=refine, name=path.name)
    with atomic_file(path) as file:
        sink_type, write = FORMATS[name]
        with sink_type(file) as sink:
            notes = write(merge, sink)
        size = file.tell()
    read = [f"rank {fact.rank}: {note}" for fact in merge.facts for note in fact.notes]
    notes = list(dict.fromkeys((*capture_notes(sources), *read, *merge.alignment.notes, *notes)))
    return MergedTrace(Written(path, size, tuple(notes)), tuple(fact.rank for fact in merge.facts), merge.alignment)


def _facts(sources: Sequence[Source], ranks: Collection[int] | None, *, refine: bool) -> list[RankTraceFacts]:
    """Returns the facts of the wanted traces, sorted by rank."""

    def wanted(rank: int) -> bool:
        return ranks is None or rank in ranks

    facts = []
    for source in sources:
        may_differ = source.rank_from in ("name", "order")  # the opened trace may state another rank
        if may_differ or wanted(source.rank):
            found = look_at(source, collectives=refine)
            if wanted(found.rank):
                facts.append(found)
    missing = sorted(set(ranks or ()) - {fact.rank for fact in facts})
    if missing:
        raise FileError(f"there is no trace of rank {', '.join(map(str, missing[:8]))}")
    if not facts:
        raise FileError("no trace was given")
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
    later = max(0, -earliest)  # no format has times before 0
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
            raise FileError(f"rank {fact.rank} is in two traces, {places[fact.rank]} and {fact.source.path}: name one")
        places[fact.rank] = fact.source.path
    unknown = sorted(set(clocks) - set(places))
    if unknown:
        raise FileError(f"there is an offset for rank {unknown[0]}, but no trace of it")
    based = [fact for fact in facts if fact.base_ns]
    absolute = [fact for fact in facts if fact.window_ns[0] >= EARLIEST_UNIX_NS]
    if len(absolute) not in (0, len(facts)) and len(based) not in (0, len(facts)):
        odd = next(fact for fact in facts if fact not in absolute)
        raise FileError(
            f"{odd.source.path} does not say when it was recorded ({_BASE}), so it cannot be merged with others"
        )


# ------------------------------------------------------------ what the file says of itself


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
