"""The progress of a capture, on stderr: a live table in a terminal, plain lines elsewhere, nothing with --quiet."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kinetoctl.client import enum_names
from kinetoctl.output import units
from kinetoctl.output.console import say, stderr_console
from kinetoctl.output.recorded import StateTimes, extent, figures, recorded, time_text

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.client.tracing import Progress

REFRESHES_PER_S = 8
TargetKey = tuple[int, int]


class Quiet:
    """Reports nothing."""

    def note(self, text: str) -> None:
        """Discards the note."""

    def update(self, capture: "pb.Capture") -> None:
        """Shows nothing."""

    def fetching(self, target: "pb.Target", received: int, file: "pb.TraceFile") -> None:
        """Shows nothing."""


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


class Lines:
    """Prints a line for each change of a target's state; the last has what was recorded."""

    def __init__(self) -> None:
        self._said: dict[TargetKey, str] = {}

    def note(self, text: str) -> None:
        """Prints one line."""
        say(text, err=True)

    def update(self, capture: "pb.Capture") -> None:
        """Prints a line for each target whose state has changed."""
        for target in capture.targets:
            text = state_text(target)
            if self._said.get(_key(target)) != text:
                self._said[_key(target)] = text
                say(f"{enum_names.target(target)}: {state_line(target, capture.spec)}", err=True)

    def fetching(self, target: "pb.Target", received: int, file: "pb.TraceFile") -> None:
        """Shows nothing: it would clutter a log."""


class LiveTable:
    """A live table: state, for how long and of how long, records and bytes so far."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._capture: pb.Capture | None = None
        self._times = StateTimes()
        self._fetched: dict[TargetKey, str] = {}

    def note(self, text: str) -> None:
        """A line above the table."""
        self._live.console.print(text, markup=False)

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
        table.add_column("TARGET")
        table.add_column("STATE")
        for column in ("FOR", "RECORDS", "BYTES", "DROPPED"):
            table.add_column(column, justify="right")
        table.add_column("")
        for row in self._rows():
            table.add_row(*map(Text, row))
        return table


@contextmanager
def _live_table(console: Console) -> Iterator["Progress"]:
    with Live(console=console, refresh_per_second=REFRESHES_PER_S) as live:
        shown = LiveTable(live)
        live.update(shown)
        yield shown


@contextmanager
def show_progress(*, quiet: bool, color: bool) -> Iterator["Progress"]:
    """Yields the right progress display: none, lines or a live table."""
    if quiet:
        yield Quiet()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        with _live_table(stderr_console(color=color)) as progress:
            yield progress
