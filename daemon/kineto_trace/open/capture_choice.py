"""Several captures of the same processes: which of them is analysed, and what is said of the others.

Theory of operation
    Traces are captures of one process if they say the same rank, or the same host and process id, or are files of one
    worker of a TensorBoard log folder; and if their captures differ. A process is in an analysis once. By default it is
    there with the capture in which most processes take part, of equal ones the latest; if it is not in that one, with
    its own latest. The ids of captures begin with their time.
"""

from collections.abc import Sequence
from dataclasses import replace

from kineto_trace.errors import FileError
from kineto_trace.open.trace_source import Source

LATEST, ALL = "latest", "all"
_MAX_LISTED = 6  # captures in a note


def chosen_captures(sources: Sequence[Source], captures: str = LATEST) -> list[Source]:
    """Returns each process with one of its captures: "latest", the one of this id, or "all". Raises FileError."""
    known = sorted({source.capture for source in sources if source.capture})
    if captures not in (LATEST, ALL, *known):
        listed = ", ".join(known[-_MAX_LISTED:]) or "none of these traces says its capture"
        raise FileError(f"there is no capture {captures}; expected {LATEST}, {ALL}, or one of: {listed}")
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
    """Returns a note for the captures that were left out: which one is used, of which ranks."""
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
    """Returns the capture to use of one process; all if it is not known which captures they are of."""
    captures = sorted({source.capture for source in group})
    if len(captures) < 2 or not captures[0]:
        return list(group)
    wanted = main if main in captures else captures[-1]
    others = tuple(capture for capture in captures if capture != wanted)
    return [replace(source, left_out=others) for source in group if source.capture == wanted]
