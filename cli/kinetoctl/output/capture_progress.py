"""The progress of a capture on one host or many, on stderr: a live table in a terminal, plain lines elsewhere.

With --quiet there is none.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from kineto_trace.base.quantities import format_duration
from kineto_trace.base.visible_text import one_line
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kinetoctl.client import enum_names
from kinetoctl.client.fleet.host_run import FleetProgress, HostRun
from kinetoctl.client.tracing import Progress, Quiet
from kinetoctl.output import units
from kinetoctl.output.console import say, stderr_console

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

REFRESHES_PER_S = 8
TargetKey = tuple[int, int]
L = TypeVar("L", bound="_Log")
D = TypeVar("D", bound="_Display")


def _key(target: "pb.Target") -> TargetKey:
    return target.pid, target.start_time_ns


def state_text(target: "pb.Target") -> str:
    """The state of a target, or its verdict once it has one."""
    state = enum_names.target_state(target.state)
    if state != "ENDED":
        return state
    verdict = enum_names.verdict(target.verdict)
    return verdict if target.reason_code in ("", verdict) else f"{verdict} {target.reason_code}"


def state_line(target: "pb.Target", spec: "pb.CaptureSpec") -> str:
    """The state for a log: with what is requested when recording begins, and what was recorded when it has ended."""
    text = state_text(target)
    if enum_names.target_state(target.state) == "COLLECT" and (wanted := extent(spec)):
        return f"{text} for {wanted}"
    return ", ".join((text, *recorded(target, spec))) if enum_names.target_state(target.state) == "ENDED" else text


class _Log:
    """Lines on stderr."""

    def note(self, text: str) -> None:
        """Prints one line."""
        say(text, err=True)


class _Display(ABC):
    """A table that rich draws anew all the time."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._times = StateTimes()

    def note(self, text: str) -> None:
        """A line above the table."""
        self._live.console.print(text, markup=False)

    @abstractmethod
    def __rich__(self) -> Table:
        """The table at this moment."""


class Lines(_Log):
    """Prints a line for each change of a target's state; the last has what was recorded."""

    def __init__(self) -> None:
        self._said: dict[TargetKey, str] = {}

    def update(self, capture: "pb.Capture") -> None:
        """Prints a line for each target whose state has changed."""
        for target in capture.targets:
            text = state_text(target)
            if self._said.get(_key(target)) != text:
                self._said[_key(target)] = text
                say(f"{enum_names.target(target)}: {state_line(target, capture.spec)}", err=True)

    def fetching(self, target: "pb.Target", received: int, file: "pb.TraceFile") -> None:
        """Shows nothing: it would clutter a log."""


class LiveTable(_Display):
    """A live table: state, for how long and of how long, records and bytes so far."""

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self._capture: pb.Capture | None = None
        self._fetched: dict[TargetKey, str] = {}

    def update(self, capture: "pb.Capture") -> None:
        """Shown at the next refresh."""
        self._capture = capture
        for target in capture.targets:
            self._times.see(_key(target), target)

    def fetching(self, target: "pb.Target", received: int, file: "pb.TraceFile") -> None:
        """Shown at the next refresh, beside the verdict."""
        share = received / file.size_bytes if file.size_bytes else 1.0
        self._fetched[_key(target)] = f"fetched {share:.0%} of {units.size(file.size_bytes)}"

    def _rows(self) -> "Iterable[tuple[str, ...]]":
        capture = self._capture
        if capture is None:
            return
        for target in capture.targets:
            yield (
                enum_names.target(target),
                one_line(state_text(target)),
                time_text(target, capture.spec, self._times.seconds(_key(target))),
                *figures(target),
                self._fetched.get(_key(target), ""),
            )

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        _add_columns(table, "TARGET", "STATE")
        table.add_column("")
        for row in self._rows():
            table.add_row(*map(Text, row))
        return table


def _add_columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name)
    for name in ("FOR", "RECORDS", "BYTES", "DROPPED"):
        table.add_column(name, justify="right")


@contextmanager
def _shown(lines: Callable[[], L], table: Callable[[Live], D], *, quiet: bool, color: bool) -> Iterator[L | D | Quiet]:
    """Yields the right display: none, lines or a live table."""
    if quiet:
        yield Quiet()
    elif not sys.stderr.isatty():
        yield lines()
    else:
        with Live(console=stderr_console(color=color), refresh_per_second=REFRESHES_PER_S) as live:
            shown = table(live)
            live.update(shown)
            yield shown


def show_progress(*, quiet: bool, color: bool) -> AbstractContextManager[Progress]:
    """The display of a capture on one host."""
    return _shown(Lines, LiveTable, quiet=quiet, color=color)


class StateTimes:
    """For how long each target has been in its state: since this program saw the change, or, if it was in this state
    when it was first seen, since the time that the daemon gives.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock, self._wall_ns = clock, wall_ns
        self._since: dict[Hashable, tuple[int, float]] = {}

    def see(self, key: Hashable, target: "pb.Target") -> None:
        """The target as it is now."""
        known = self._since.get(key)
        if known is not None and known[0] == target.state:
            return
        earlier_ns = self._wall_ns() - target.state_since_ns if known is None and target.state_since_ns else 0
        self._since[key] = target.state, self._clock() - max(earlier_ns, 0) / 1e9

    def seconds(self, key: Hashable) -> float:
        """Seconds since its state was first seen."""
        return self._clock() - self._since[key][1] if key in self._since else 0.0


def extent(spec: "pb.CaptureSpec") -> str:
    """How long it is to record: `5 s`, `20 iterations`; empty if that is unknown."""
    if spec.HasField("iterations"):
        counted = f"{units.count(spec.iterations.count)} iterations" if spec.iterations.count != 1 else "1 iteration"
        return f"{counted} or {format_duration(spec.or_duration_ns)}" if spec.HasField("or_duration_ns") else counted
    return format_duration(spec.duration_ns) if spec.duration_ns else ""


def time_text(target: "pb.Target", spec: "pb.CaptureSpec", state_s: float) -> str:
    """`3.2 s of 5 s` while it records and afterwards, else only for how long its state has lasted (state_s)."""
    state = enum_names.target_state(target.state)
    if state == "COLLECT":
        return _of(_seconds(state_s), target, spec)
    if state == "ENDED":
        recorded_ns = target.collected_ns - target.collecting_ns
        return _of(_seconds(recorded_ns / 1e9), target, spec) if target.collected_ns else ""
    return _seconds(state_s)


def _seconds(seconds: float) -> str:
    """To a tenth of a second, so that one sees it move; above a minute to the second."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(round(seconds) * 10**9)


def _of(elapsed: str, target: "pb.Target", spec: "pb.CaptureSpec") -> str:
    if not spec.HasField("iterations"):
        return " of ".join(filter(None, (elapsed, extent(spec))))
    seen = f"{units.count(target.summary.iterations)} of " if target.summary.iterations > 0 else ""
    return f"{elapsed}, {seen}{extent(spec)}"


def figures(*targets: "pb.Target") -> tuple[str, str, str]:
    """Records, bytes and dropped records so far, of all targets together."""
    counts = [count for target in targets for count in target.counts]
    return (
        units.count(sum(count.records for count in counts)),
        units.size(sum(count.bytes for count in counts)),
        units.count(sum(count.dropped for count in counts)),
    )


def summed(targets: "Sequence[pb.Target]") -> list[str]:
    """The figures with their names, for one line; none if nothing is known."""
    if not any(target.counts for target in targets):
        return []
    records, size, dropped = figures(*targets)
    return [f"{records} records", size, f"{dropped} dropped"]


def recorded(target: "pb.Target", spec: "pb.CaptureSpec") -> list[str]:
    """What an ended target has recorded, for one line: its time and figures, as far as they are known."""
    return [*([time_text(target, spec, 0.0)] if target.collected_ns else []), *summed([target])]


# ------------------------------------------------------------ many hosts

FEW = 16  # up to this many processes have a line each
LINES_EVERY_S = 1.0
SHOWN_HOSTS = 40  # in the live table; hosts that are not done come first


def rank_state(member: HostRun, target: "pb.Target") -> str:
    """The state or verdict of a process, or UNKNOWN if its host was lost."""
    return "UNKNOWN HOST_LOST" if member.is_lost(target) else state_text(target)


def states_text(states: Mapping[str, int]) -> str:
    """`1,900 COLLECT, 148 WARMUP`."""
    return ", ".join(f"{units.count(count)} {state}" for state, count in sorted(states.items()))


class FleetLines(_Log):
    """Prints a line for each change of a process, or, for many processes, the number in each state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[int, HostRun] = {}
        self._said: dict[tuple[int, int, int], str] = {}
        self._are_many = False
        self._states = ""
        self._next_s = 0.0

    def update(self, member: HostRun) -> None:
        """Prints a line if something has changed."""
        self._members[id(member)] = member
        self._are_many = self._are_many or sum(len(each.targets) for each in self._members.values()) > FEW
        if not self._are_many:
            self._each(member)
        elif self._clock() >= self._next_s:
            self._next_s = self._clock() + LINES_EVERY_S
            self._all()

    def _each(self, member: HostRun) -> None:
        for target in member.targets:
            key = id(member), target.pid, target.start_time_ns
            text = rank_state(member, target)
            if enum_names.target_state(target.state) != "PENDING" and self._said.get(key) != text:
                self._said[key] = text
                line = (
                    text
                    if member.capture is None or member.is_lost(target)
                    else state_line(target, member.capture.spec)
                )
                say(f"{member.place.host} {enum_names.target(target)}: {line}", err=True)

    def _all(self) -> None:
        text = states_text(counted(self._members.values()))
        if text != self._states:
            self._states = text
            targets = [target for member in self._members.values() for target in member.targets]
            say(", ".join((text, *summed(targets))), err=True)

    def fetched(self, files: int, total: int, size_bytes: int) -> None:
        """Prints a line once all files are here."""
        if files == total:
            say(f"downloaded {units.count(files)} files, {units.size(size_bytes)}", err=True)


def counted(members: Iterable[HostRun]) -> Counter[str]:
    """State -> number of processes in it."""
    return Counter(rank_state(member, target) for member in members for target in member.targets)


class FleetTable(_Display):
    """A live table of the processes, or, for many, of the number of each host's processes in each state."""

    def __init__(self, live: Live, members: Sequence[HostRun]) -> None:
        super().__init__(live)
        self._members = members
        self._fetched = ""

    def update(self, member: HostRun) -> None:
        """Shown at the next refresh."""
        for target in member.targets:
            self._times.see((id(member), target.pid, target.start_time_ns), target)

    def fetched(self, files: int, total: int, size_bytes: int) -> None:
        """Shown at the next refresh."""
        self._fetched = f"fetched {units.count(files)} of {units.count(total)} files, {units.size(size_bytes)}"

    def __rich__(self) -> Table:
        states = counted(self._members)
        figures_of_all = summed([target for member in self._members for target in member.targets])
        title = ", ".join(filter(None, (states_text(states), self._longest(), *figures_of_all, self._fetched)))
        table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="")
        if states.total() <= FEW:
            self._processes(table)
        else:
            self._hosts(table)
        return table

    def _time(self, member: HostRun, target: "pb.Target") -> str:
        if member.capture is None or member.is_lost(target):
            return ""
        seconds = self._times.seconds((id(member), target.pid, target.start_time_ns))
        return time_text(target, member.capture.spec, seconds)

    def _longest(self) -> str:
        """For how long the first of many processes that still record has done so."""
        texts = (
            self._time(member, target)
            for member in self._members
            for target in member.targets
            if enum_names.target_state(target.state) == "COLLECT"
        )
        return next(texts, "")

    def _processes(self, table: Table) -> None:
        _add_columns(table, "HOST", "TARGET", "STATE")
        for member in self._members:
            for target in member.targets:
                table.add_row(
                    Text(one_line(member.place.host)),
                    enum_names.target(target),
                    Text(one_line(rank_state(member, target))),
                    self._time(member, target),
                    *figures(target),
                )

    def _hosts(self, table: Table) -> None:
        for column in ("HOST", "PROCESSES"):
            table.add_column(column)
        open_first = sorted(self._members, key=lambda member: not (member.is_running or member.error))
        for member in open_first[:SHOWN_HOSTS]:
            state = states_text(counted([member])) or ("FAILED" if member.error else "…")
            table.add_row(Text(one_line(member.place.host)), Text(one_line(state)))
        if (more := len(open_first) - SHOWN_HOSTS) > 0:
            table.add_row("…", f"{units.count(more)} more hosts")


def show_fleet(members: Sequence[HostRun], *, quiet: bool, color: bool) -> AbstractContextManager[FleetProgress]:
    """The display of a capture of many hosts."""
    return _shown(FleetLines, lambda live: FleetTable(live, members), quiet=quiet, color=color)
