"""The progress of a capture of many hosts, on stderr: a live table in a terminal, plain lines elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kinetoctl.client import enum_names
from kinetoctl.client.fleet.host_run import FleetProgress, FleetQuiet, HostRun
from kinetoctl.output import units
from kinetoctl.output.capture_progress import REFRESHES_PER_S, state_line, state_text
from kinetoctl.output.console import say, stderr_console
from kinetoctl.output.recorded import StateTimes, figures, summed, time_text

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

FEW = 16  # up to this many processes have a line each
LINES_EVERY_S = 1.0
SHOWN_HOSTS = 40  # in the live table; hosts that are not done come first


def rank_state(member: HostRun, target: "pb.Target") -> str:
    """The state or verdict of a process, or UNKNOWN if its host was lost."""
    return "UNKNOWN HOST_LOST" if member.is_lost(target) else state_text(target)


def states_text(states: Mapping[str, int]) -> str:
    """`1,900 COLLECT, 148 WARMUP`."""
    return ", ".join(f"{units.count(count)} {state}" for state, count in sorted(states.items()))


class FleetLines:
    """Prints a line for each change of a process, or, for many processes, the number in each state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[int, HostRun] = {}
        self._said: dict[tuple[int, int, int], str] = {}
        self._are_many = False
        self._states = ""
        self._next_s = 0.0

    def note(self, text: str) -> None:
        """Prints one line."""
        say(text, err=True)

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
            say(f"{units.count(files)} files, {units.size(size_bytes)}, downloaded", err=True)


def counted(members: Iterable[HostRun]) -> Counter[str]:
    """State -> number of processes in it."""
    return Counter(rank_state(member, target) for member in members for target in member.targets)


class FleetTable:
    """A live table of the processes, or, for many, of the number of each host's processes in each state."""

    def __init__(self, live: Live, members: Sequence[HostRun]) -> None:
        self._live, self._members = live, members
        self._times = StateTimes()
        self._fetched = ""

    def note(self, text: str) -> None:
        """A line above the table."""
        self._live.console.print(text, markup=False)

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
        for column in ("HOST", "TARGET", "STATE"):
            table.add_column(column)
        for column in ("FOR", "RECORDS", "BYTES", "DROPPED"):
            table.add_column(column, justify="right")
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


@contextmanager
def show_fleet(members: Sequence[HostRun], *, quiet: bool, color: bool) -> Iterator[FleetProgress]:
    """Yields the right display: none, lines or a live table."""
    if quiet:
        yield FleetQuiet()
    elif not sys.stderr.isatty():
        yield FleetLines()
    else:
        with Live(console=stderr_console(color=color), refresh_per_second=REFRESHES_PER_S) as live:
            shown = FleetTable(live, members)
            live.update(shown)
            yield shown
