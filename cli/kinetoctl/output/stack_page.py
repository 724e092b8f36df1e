"""What `kinetoctl stacks` prints: the verdict, what could not be read, and the groups with their frames. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kineto_protos.plain import plain
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, format_ranges

from kinetoctl.client import enum_names
from kinetoctl.output.console import GAP, INDENT
from kinetoctl.output.stack_groups import (
    ReadProcess,
    StackGroup,
    does,
    gpus_do,
    grouped,
    line_of,
    other_threads,
    place,
    stack_key,
)
from kinetoctl.output.stack_verdict import listed, plural, verdicts
from kinetoctl.output.units import shortened

CODE_WIDTH = 60
ONE_LOOK = "One look cannot tell a hang from a moment: look again, or use --watch, to see whether they stand still."


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLook:
    """What the daemons said at one moment.

    failures: hosts that gave no answer or only a part, each with its error; the only host has no name.
    empty: hosts where no process matches.
    """

    processes: Sequence[ReadProcess]
    failures: Sequence[tuple[str, str]] = ()
    empty: Sequence[str] = ()

    @property
    def complete(self) -> bool:
        """Whether every host answered in full and every process could be read."""
        return not self.failures and not any(each.stacks.reason for each in self.processes)


@dataclass(frozen=True, slots=True)
class StandingTimes:
    """For how long each main thread has been seen in the same place, over several looks."""

    _since: dict[tuple[Any, ...], tuple[Any, int]] = field(default_factory=dict)

    def note(self, look: StackLook) -> None:
        """Compares a new look with the one before it."""
        known = dict(self._since)
        self._since.clear()
        for each in look.processes:
            if each.main is None:
                continue
            key, stack = _identity(each), stack_key(each.main)
            before, since_ns = known.get(key, (None, 0))
            self._since[key] = (stack, since_ns if before == stack else each.stacks.time_ns)

    def of(self, group: StackGroup) -> int:
        """In ns, of the member that came last; 0 if it was not there at the look before."""
        times = [each.stacks.time_ns - self._since[_identity(each)][1] for each in group.members if each.main]
        return max(min(times, default=0), 0)


def _identity(process: ReadProcess) -> tuple[Any, ...]:
    return process.host, process.pid, process.stacks.process.start_time_ns


Stood = Callable[[StackGroup], int]


def document(look: StackLook, stood: Stood) -> dict[str, Any]:
    """The look for JSON."""
    return {
        "verdict": "\n".join(verdicts(look.processes)),
        "groups": [_group_document(group, stood(group)) for group in grouped(look.processes)],
        "processes": [{**_host(each), **plain(each.stacks)} for each in look.processes],
        "errors": [{**({"host": host} if host else {}), "error": error} for host, error in look.failures],
    }


def _host(process: ReadProcess) -> dict[str, str]:
    return {"host": process.host} if process.host else {}


def _group_document(group: StackGroup, stood_ns: int) -> dict[str, Any]:
    main = group.main
    frame = place(main) if main is not None else None
    return {
        "processes": [{**_host(each), "pid": each.pid, "rank": each.rank} for each in group.members],
        "wait": enum_names.wait(main.wait) if main is not None else None,
        "waits": does(main) if main is not None else None,
        "place": plain(frame) if frame is not None else None,
        "alike": group.alike,
        "stood_ns": stood_ns,
    }


def page(look: StackLook, stood: Stood, *, wide: bool, all_threads: bool) -> Iterator[str]:
    """The lines of the look; before the first empty one stands the verdict.

    wide: with whole paths, the command of each process, and what the kernel says of the threads.
    """
    yield from verdicts(look.processes)
    yield from _troubles(look)
    groups = grouped(look.processes)
    for group in groups:
        yield ""
        yield from _group(group, stood(group), wide=wide, all_threads=all_threads)
    waits = any(group.main is not None and group.main.wait not in (pb.WAIT_NONE, pb.WAIT_STOPPED) for group in groups)
    if waits and not any(stood(group) for group in groups):
        yield ""
        yield ONE_LOOK


def _troubles(look: StackLook) -> Iterator[str]:
    hosts = {each.host for each in look.processes}
    for host, error in look.failures:
        what = host if host not in hosts else f"the rest of {host}" if host else "the rest"
        yield f"{what} was not read: {error}"
    if look.empty:
        yield f"no process matches on {listed([(host, 1) for host in look.empty])}"
    for each in sorted(look.processes, key=lambda each: each.order):
        if each.stacks.reason:
            yield f"{_title(each)}: {each.stacks.reason}"
        if each.stacks.left_out:
            yield f"{_title(each)}: {each.stacks.left_out:,} more threads are beyond the daemon's limit"


def _title(process: ReadProcess) -> str:
    rank = "" if process.rank is None else f"rank {process.rank}{GAP}"
    return f"{rank}pid {process.pid}{f' on {process.host}' if process.host else ''}"


def _titles(group: StackGroup, *, wide: bool) -> str:
    if len(group.members) == 1:
        return _title(group.members[0])
    ranks = [each.rank for each in group.members if each.rank is not None]
    if len(set(ranks)) == len(group.members):
        return f"{len(ranks):,} ranks: {format_ranges(ranks)}"
    pids = [(f"{each.pid}{f' on {each.host}' if each.host else ''}", 1) for each in group.members]
    return f"{len(pids):,} processes{'' if wide else f': {listed(pids)}'}"


def _group(group: StackGroup, stood_ns: int, *, wide: bool, all_threads: bool) -> Iterator[str]:
    main = group.main
    if main is None:
        yield f"{_titles(group, wide=wide)}{GAP}not read"
        for each in group.members:
            if (thread := each.main_without_frames) is not None:
                title = f"{_title(each)}{GAP}" if len(group.members) > 1 else ""
                yield f"{INDENT}{title}main thread, without its frames{GAP}{_doing([thread], wide=wide)}"
        return
    parts = [_titles(group, wide=wide), "main thread", _doing([main], wide=wide)]
    if stood_ns:
        parts.append(f"at each look for {format_duration(stood_ns)}")
    if not group.alike:
        parts.append(f"(frames of {_title(group.members[0])})")
    yield GAP.join(parts)
    if wide:
        for each in group.members:
            title = f"{_title(each)}{GAP}" if len(group.members) > 1 else ""
            yield f"{INDENT}{title}{' '.join(each.stacks.process.command)}"
    yield from _frames(main, wide=wide)
    for text, gpus in gpus_do(group.members).items():
        numbers = format_ranges(sorted({gpu.gpu.index for gpu in gpus}))
        yield f"{GAP}GPU {numbers} {text}" if len(gpus) == 1 else f"{GAP}GPUs {numbers} {plural(text)}"
    rows, left_out = other_threads(group, idle=all_threads)
    for threads in rows:
        yield f"{GAP}{_names(threads)}{GAP}{_doing(threads, wide=wide)}"
        yield from _frames(threads[0], wide=wide)
    if left_out:
        yield f"{GAP}and {left_out:,} {'thread' if left_out == 1 else 'threads'} without code of the program"


def _names(threads: Sequence[pb.ThreadStack]) -> str:
    if len(threads) == 1:
        return f"thread {threads[0].thread}{f' {threads[0].name}' if threads[0].name else ''}"
    names = dict.fromkeys(thread.name for thread in threads if thread.name)
    return f"{len(threads):,} threads{f' {listed([(name, 1) for name in names])}' if names else ''}"


def _doing(threads: Sequence[pb.ThreadStack], *, wide: bool) -> str:
    parts = [does(threads[0])]
    if any(thread.holds_gil for thread in threads):
        parts.append("holds the GIL")
    if wide and len(threads) == 1:
        (thread,) = threads
        call = f" in {thread.system_call}" if thread.system_call else ""
        parts.append(f"thread {thread.thread} {enum_names.thread_state(thread.state).lower()}{call}")
        parts.append(f"{format_duration(thread.cpu_ns)} of CPU")
    return GAP.join(parts)


def _frames(thread: pb.ThreadStack, *, wide: bool) -> Iterator[str]:
    rows = [
        (frame.function, line_of(frame, complete=wide), frame.code if wide else shortened(frame.code, CODE_WIDTH))
        for frame in thread.frames
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for function, line, code in rows:
        yield f"{INDENT}{function:{widths[0]}}{GAP}{line:{widths[1]}}{GAP}{code}".rstrip()
    if thread.left_out:
        yield f"{INDENT}and {thread.left_out:,} outer frames"
