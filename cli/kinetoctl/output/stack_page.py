"""What a look at stacks shows: the verdict, what could not be read, and the groups with their frames. Pure.

`kinetoctl stacks` prints it as lines, the web page and notebooks as HTML, and programs get it as a document.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kineto_protos.plain import plain
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, format_ranges, shortened

from kinetoctl.client import enum_names
from kinetoctl.errors import NotFound
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
from kinetoctl.output.units import GAP, INDENT

if TYPE_CHECKING:
    from kinetoctl.client.daemon_client import StackAnswer
    from kinetoctl.client.fleet.host_client import HostAnswer

CODE_WIDTH = 60
ONE_LOOK = "At first, a hang looks like a short wait: look again, or use --watch, to see whether anything moves."


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


def look_of(answers: "Sequence[HostAnswer[StackAnswer]]") -> StackLook:
    """What the hosts answered; those without a match answer NotFound.

    Raises NotFound if no process matches on any, and the first host's error if none answers.
    """
    found = [(place, answer) for place, answer, _ in answers if answer is not None]
    failed = [(place, error or (answer and answer.error)) for place, answer, error in answers]
    empty = [place.host for place, error in failed if isinstance(error, NotFound)]
    matching = {place.host for place, _ in found}
    look = StackLook(
        processes=[ReadProcess(stacks=each, host=place.host) for place, answer in found for each in answer.stacks],
        failures=[(place.host, str(error)) for place, error in failed if error and not isinstance(error, NotFound)],
        empty=list(dict.fromkeys(host for host in empty if host not in matching)),
    )
    if look.processes:
        return look
    if len(answers) > 1 and empty:
        raise NotFound("; ".join(["no process matches", *(f"{host}: {error}" for host, error in look.failures)]))
    raise next((error for _, error in failed if error), NotFound("no process matches"))


@dataclass(frozen=True, slots=True)
class StandingTimes:
    """For how long each main thread has been seen in the same place, over several looks."""

    _since: Mapping[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)

    def after(self, look: StackLook) -> "StandingTimes":
        """Those after one more look."""
        since = {}
        for each in look.processes:
            if each.main is None:
                continue
            key, stack = _identity(each), hash(stack_key(each.main))
            before, since_ns = self._since.get(key, (None, 0))
            since[key] = (stack, since_ns if before == stack else each.stacks.time_ns)
        return StandingTimes(since)

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


class ShownThread(NamedTuple):
    """Threads that do the same in the same frames. doing: what, then further facts; stack: that of the first."""

    name: str
    doing: list[str]
    stack: pb.ThreadStack


class ShownGroup(NamedTuple):
    """A group as people read it.

    main: the main thread of the first member; None if none could be read: unread says what the kernel knows of each.
    remarks: what else is said of the main thread. commands: each member with its command.
    gpus: what the GPUs of its members did.
    """

    title: str
    main: ShownThread | None
    remarks: list[str]
    unread: list[str]
    commands: list[str]
    others: list[ShownThread]
    idle: list[ShownThread]
    idle_title: str
    gpus: list[str]


def shown_groups(look: StackLook, stood: Stood, *, wide: bool) -> list[ShownGroup]:
    """The groups of a look. wide: with what the kernel says of single threads, and without pids in the titles."""
    return [_shown(group, stood(group), wide=wide) for group in grouped(look.processes)]


def needs_another(look: StackLook, stood: Stood) -> bool:
    """Whether only a further look can tell if what waits stands still."""
    groups = grouped(look.processes)
    waits = any(group.main is not None and group.main.wait not in (pb.WAIT_NONE, pb.WAIT_STOPPED) for group in groups)
    return waits and not any(stood(group) for group in groups)


def page(look: StackLook, stood: Stood, *, wide: bool, all_threads: bool) -> Iterator[str]:
    """The lines of the look; before the first empty one stands the verdict.

    wide: with whole paths, the command of each process, and what the kernel says of the threads.
    """
    yield from verdicts(look.processes)
    yield from troubles(look)
    for group in shown_groups(look, stood, wide=wide):
        yield ""
        yield from _lines(group, wide=wide, all_threads=all_threads)
    if needs_another(look, stood):
        yield ""
        yield ONE_LOOK


def troubles(look: StackLook) -> Iterator[str]:
    """What could not be read, and why."""
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
            yield f"{_title(each)}: {each.stacks.left_out:,} more threads were left out (the daemon's limit)"


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


def _shown(group: StackGroup, stood_ns: int, *, wide: bool) -> ShownGroup:
    main, mains = group.main, [each.main for each in group.members if each.main is not None]
    named = [(f"{_title(each)}{GAP}" if len(group.members) > 1 else "", each) for each in group.members]
    remarks = [f"the same at every look for {format_duration(stood_ns)}"] if stood_ns else []
    busy, idle = other_threads(group)
    count = sum(map(len, idle))
    return ShownGroup(
        title=_titles(group, wide=wide),
        main=None if main is None else ShownThread("main thread", _doing(mains, wide=wide), main),
        remarks=remarks if group.alike else [*remarks, f"(frames of {_title(group.members[0])})"],
        unread=[
            f"{name}main thread, without its frames{GAP}{GAP.join(_doing([thread], wide=wide))}"
            for name, each in named
            if (thread := each.main_without_frames) is not None
        ],
        commands=[f"{name}{' '.join(each.stacks.process.command)}" for name, each in named],
        others=[ShownThread(_names(each), _doing(each, wide=wide), each[0]) for each in busy],
        idle=[ShownThread(_names(each), _doing(each, wide=wide), each[0]) for each in idle],
        idle_title=f"{count:,} {'thread' if count == 1 else 'threads'} outside the program's code",
        gpus=[
            f"GPU {_indexes(gpus)} {text}" if len(gpus) == 1 else f"GPUs {_indexes(gpus)} {plural(text)}"
            for text, gpus in gpus_do(group.members).items()
        ],
    )


def _indexes(gpus: Sequence[pb.GpuSample]) -> str:
    return format_ranges(sorted({each.gpu.index for each in gpus}))


def _lines(group: ShownGroup, *, wide: bool, all_threads: bool) -> Iterator[str]:
    if group.main is None:
        yield f"{group.title}{GAP}not read"
        yield from (f"{INDENT}{text}" for text in group.unread)
        return
    yield GAP.join([group.title, group.main.name, *group.main.doing, *group.remarks])
    yield from (f"{INDENT}{text}" for text in group.commands if wide)
    yield from _frames(group.main.stack, wide=wide)
    yield from (f"{GAP}{text}" for text in group.gpus)
    for each in [*group.others, *(group.idle if all_threads else ())]:
        yield f"{GAP}{GAP.join([each.name, *each.doing])}"
        yield from _frames(each.stack, wide=wide)
    if group.idle and not all_threads:
        yield f"{GAP}and {group.idle_title}"


def _names(threads: Sequence[pb.ThreadStack]) -> str:
    if len(threads) == 1:
        return f"thread {threads[0].thread}{f' {threads[0].name}' if threads[0].name else ''}"
    names = dict.fromkeys(thread.name for thread in threads if thread.name)
    return f"{len(threads):,} threads{f' {listed([(name, 1) for name in names])}' if names else ''}"


def _doing(threads: Sequence[pb.ThreadStack], *, wide: bool) -> list[str]:
    parts = [does(threads[0])]
    if any(thread.holds_gil for thread in threads):
        parts.append("holds the GIL")
    if wide and len(threads) == 1:
        (thread,) = threads
        call = f" in {thread.system_call}" if thread.system_call else ""
        parts.append(f"thread {thread.thread} {enum_names.thread_state(thread.state).lower()}{call}")
        parts.append(f"{format_duration(thread.cpu_ns)} of CPU")
    return parts


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
