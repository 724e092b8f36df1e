"""Finds traces (files, folders of them, captures, TensorBoard log folders, patterns) and their ranks.

Theory of operation
    A rank comes from the trace (distributedInfo of a Chrome trace, target.json of the daemon); else from the name
    (`rank3`, `rank_3` in the name of the file or its folder; `trace_3`, if all the names of a call differ in that
    number); else it is the smallest free number, in the order of names, the same one for all captures of a process.

    If a process has several captures, one is used. Remaining duplicates of a rank are kept. rank_notes() reports both.
    Only the heads of files are read.

    remote_traces.py finds the traces in an object store; their ranks are determined in the same way.
"""

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from kineto_trace.errors import FileError
from kineto_trace.open.trace_source import (
    TRACE_SUFFIXES,
    may_be_trace,
    natural_order,
    origin_in,
    origin_of,
    traces_below,
    unpacked_head,
)
from kineto_trace.open.trace_source import Source as Source
from kineto_trace.store.object_stores import is_url

MAX_NAME_RANK = 99_999

_TENSORBOARD = re.compile(r"(?P<worker>.+?)(?:\.(?P<span>\d+))?\.pt\.trace\.json(?:\.gz)?$")
_RANK_WORD = re.compile(r"(?i)(?<![a-z])rank[_\-=.]?(\d+)")
_LAST_NUMBER = re.compile(r"[_\-](\d{1,5})$")
LATEST, ALL = "latest", "all"
_MAX_LISTED = 6  # captures listed in a note


# Several captures of the same processes: selects the one to analyse, and reports the others.
# Traces are captures of one process if they state the same rank, or the same host and process id, or are files of one
# worker of a TensorBoard log folder; and if their captures differ. A process is in an analysis once. By default it
# appears with the capture in which most processes take part (the latest of equal ones); if it is not in that one, with
# its own latest. The ids of captures begin with their time.
def chosen_captures(sources: Sequence[Source], captures: str = LATEST) -> list[Source]:
    """Returns each process with one of its captures: "latest", the one of this id, or "all". Raises FileError."""
    known = sorted({source.capture for source in sources if source.capture})
    if captures not in (LATEST, ALL, *known):
        listed = ", or one of: " + ", ".join(known[-_MAX_LISTED:]) if known else " (these traces have no capture ids)"
        raise FileError(f"there is no capture {captures}; expected {LATEST}, {ALL}{listed}")
    if captures == ALL:
        return list(sources)
    if captures != LATEST:
        return [source for source in sources if source.capture == captures]
    groups: dict[tuple[str, object], list[Source]] = {}
    for source in sources:
        groups.setdefault(_identity(source), []).append(source)
    processes: dict[str, set[tuple[str, object]]] = {}
    for identity, group in groups.items():
        for source in group:
            processes.setdefault(source.capture, set()).add(identity)
    main = max(known, key=lambda capture: (len(processes[capture]), capture), default="")
    return [source for group in groups.values() for source in _one(group, main)]


def capture_notes(sources: Sequence[Source]) -> list[str]:
    """Returns a note on the captures that were left out: which one is used, for which ranks."""
    notes: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for source in sources:
        if source.left_out:
            notes.setdefault((source.capture, source.left_out), []).append(source.rank)
    found = []
    for (capture, others), ranks in notes.items():
        shown = ", ".join(others[:_MAX_LISTED]) + (", …" if len(others) > _MAX_LISTED else "")
        whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))})"
        found.append(
            f"there are {len(others) + 1} captures of {whose}: {capture} is used; the others are {shown} "
            "(choose one with captures=ID, or --captures ID)"
        )
    return found


def _identity(source: Source) -> tuple[str, object]:
    if source.rank_from == "trace":
        return "rank", source.rank
    if source.process:
        return "process", source.process
    if source.worker:
        return "worker", (source.path.parent, source.worker)
    return "path", source.place


def _one(group: Sequence[Source], main: str) -> list[Source]:
    """Returns the capture to use of one process; all if their captures are unknown."""
    captures = sorted({source.capture for source in group})
    if len(captures) < 2 or not captures[0]:
        return list(group)
    wanted = main if main in captures else captures[-1]
    others = tuple(capture for capture in captures if capture != wanted)
    return [replace(source, left_out=others) for source in group if source.capture == wanted]


def find_traces(*paths: str | PathLike[str], fleet: str = "", captures: str = LATEST) -> list[Source]:
    """Finds the traces at these paths (files, folders, captures, patterns with * and ?, URLs), sorted by rank.

    fleet: restricts URLs to captures whose label kineto.fleet has this value.
    captures: which capture to use if a process has several: an id, "latest" or "all".

    Each trace is listed once. Raises FileError for a path without traces, and for a capture that does not exist.
    """
    found = list(dict.fromkeys(source for path in paths for source in _found(path, fleet)))
    chosen = chosen_captures(_with_ranks(_with_spans(found)), captures)
    return sorted(chosen, key=lambda source: source.rank)


def _found(path: str | PathLike[str], fleet: str) -> Iterator[Source]:
    """Yields the traces at one path, without ranks unless the store states them. Raises FileError."""
    if isinstance(path, str) and is_url(path):
        yield from _remote(path, fleet)
    else:
        yield from (Source(path=place, rank=-1) for place in _at(Path(path)))


def _remote(url: str, fleet: str) -> Iterator[Source]:
    from kineto_trace.open import remote_traces

    found = remote_traces.list_traces(url, TRACE_SUFFIXES, fleet=fleet)
    traces = [Source(path=Path(place), rank=-1, remote=trace) for place, trace in found.targets]
    for trace, place, packed in found.files:
        try:
            head = unpacked_head(Path(place), packed)
        except FileError:
            head = b""  # opening it reports the error
        if may_be_trace(place.name, head):
            origin = origin_in(head, place.name)
            known = replace(trace, rank=origin.rank, process=origin.process, capture=origin.capture)
            traces.append(Source(path=Path(place), rank=-1, remote=known))
    if not traces:
        raise FileError(f"{url}: no trace found")
    yield from traces


def rank_notes(sources: Sequence[Source]) -> list[str]:
    """Returns notes on the ranks: captures that were left out, and ranks that several traces have."""
    notes = capture_notes(sources)
    for rank in sorted({source.rank for source in sources}):
        same = [source for source in sources if source.rank == rank]
        if len(same) > 1:
            names = ", ".join(source.place for source in same)
            notes.append(f"rank {rank} has {len(same)} traces, and all of them are counted: {names}")
    return notes


def _at(path: Path) -> Iterator[Path]:
    """Yields the traces at one path or pattern. Raises FileError."""
    try:
        if path.is_dir():
            found = traces_below(path)
            if not found:
                raise FileError(f"{path} is a folder without traces")
            yield from found
        elif not path.exists() and glob.has_magic(str(path)):
            matches = sorted((Path(match) for match in glob.glob(str(path), recursive=True)), key=natural_order)  # noqa: PTH207 - absolute patterns too
            if not matches:
                raise FileError(f"no file matches {path}")
            for match in matches:
                yield from _at(match)
        elif path.exists():
            yield path
        else:
            raise FileError(f"{path} does not exist")
    except OSError as exc:
        raise FileError(f"cannot read {path}: {exc.strerror or exc}") from exc


def _with_spans(found: Sequence[Source]) -> list[Source]:
    """Adds worker and span to the files of a TensorBoard log folder."""
    matches = [_TENSORBOARD.match(source.path.name) for source in found]
    digits: dict[tuple[Path, str], set[int]] = {}
    for source, match in zip(found, matches, strict=True):
        if match is not None:
            digits.setdefault((source.path.parent, match["worker"]), set()).add(int(match["span"] or 0))
    sources = list(found)
    for place, (source, match) in enumerate(zip(found, matches, strict=True)):
        if match is not None:
            spans = sorted(digits[source.path.parent, match["worker"]])
            span = spans.index(int(match["span"] or 0)) + 1
            capture = f"span {span:04}" if len(spans) > 1 else ""  # the n-th ones of all workers belong together
            sources[place] = replace(source, worker=match["worker"], span=span, capture=capture)
    return sources


def _with_ranks(sources: Iterable[Source]) -> list[Source]:
    said = [_with_said_rank(source) for source in sources]
    _ranks_by_last_number(said)
    taken = {source.rank for source in said}
    free = (number for number in range(len(said) + len(taken)) if number not in taken)
    workers: dict[tuple[Path, str], int] = {}
    for place, source in enumerate(said):
        if source.rank < 0:
            # captures of one process have one rank
            worker = (source.path.parent, source.worker or source.path.name)
            worker = (Path(), source.process) if source.process else worker
            if worker not in workers:
                workers[worker] = next(free)
            said[place] = replace(source, rank=workers[worker], rank_from="order")
    return said


def _with_said_rank(source: Source) -> Source:
    origin = origin_of(source.path) if source.remote is None else source.remote
    process, capture = origin.process, origin.capture or source.capture
    source = replace(source, process=process, capture=capture)
    if origin.rank is not None:
        return replace(source, rank=origin.rank, rank_from="trace")
    for name in (source.path.name, source.path.parent.name):
        match = _RANK_WORD.search(name)
        if match is not None and int(match[1]) <= MAX_NAME_RANK:
            return replace(source, rank=int(match[1]), rank_from="name")
    return source


def _ranks_by_last_number(sources: list[Source]) -> None:
    """Takes ranks from names such as `trace_3`, if all names without a rank end in different numbers."""
    open_places = [place for place, source in enumerate(sources) if source.rank < 0]
    processes = [sources[place].process for place in open_places if sources[place].process]
    if len(set(processes)) < len(processes):
        return  # captures of one process: the numbers are not ranks
    numbers = {}
    for place in open_places:
        source = sources[place]
        name = source.path.name
        suffix = next((suffix for suffix in TRACE_SUFFIXES if name.endswith(suffix)), source.path.suffix)
        match = None if source.worker else _LAST_NUMBER.search(name.removesuffix(suffix).removesuffix(".pt.trace"))
        if match is not None:
            numbers[place] = int(match[1])
    if len(numbers) == len(open_places) == len(set(numbers.values())):
        for place, number in numbers.items():
            sources[place] = replace(sources[place], rank=number, rank_from="number")
