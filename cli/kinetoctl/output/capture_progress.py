"""The progress of a capture, on stderr: a live table in a terminal, plain lines elsewhere, nothing with --quiet."""

import sys
import time
from collections.abc import Iterator, Sequence
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


class Lines:
    """Prints a line for each change of a target's state."""

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
                say(f"{enum_names.target(target)}: {text}", err=True)

    def fetching(self, target: "pb.Target", received: int, file: "pb.TraceFile") -> None:
        """Shows nothing: it would clutter a log."""


class LiveTable:
    """A live table: state, time in that state, records and bytes so far."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._targets: Sequence[pb.Target] = ()
        self._since: dict[TargetKey, tuple[str, float]] = {}
        self._fetched: dict[TargetKey, str] = {}

    def note(self, text: str) -> None:
        """A line above the table."""
        self._live.console.print(text, markup=False)

    def update(self, capture: "pb.Capture") -> None:
        """Shown at the next refresh."""
        self._targets = capture.targets
        for target in capture.targets:
            text = state_text(target)
            if self._since.get(_key(target), ("", 0.0))[0] != text:
                self._since[_key(target)] = text, time.monotonic()

    def fetching(self, target: "pb.Target", received: int, file: "pb.TraceFile") -> None:
        """Shown at the next refresh, beside the verdict."""
        share = received / file.size_bytes if file.size_bytes else 1.0
        self._fetched[_key(target)] = f"fetched {share:.0%} of {units.size(file.size_bytes)}"

    def _row(self, target: "pb.Target") -> tuple[str, ...]:
        text, since = self._since.get(_key(target), ("", time.monotonic()))
        ended = enum_names.target_state(target.state) == "ENDED"
        return (
            enum_names.target(target),
            one_line(text),
            "" if ended else f"{time.monotonic() - since:.1f} s",
            units.count(sum(count.records for count in target.counts)),
            units.size(sum(count.bytes for count in target.counts)),
            units.count(sum(count.dropped for count in target.counts)),
            self._fetched.get(_key(target), ""),
        )

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("TARGET")
        table.add_column("STATE")
        for column in ("FOR", "RECORDS", "BYTES", "DROPPED"):
            table.add_column(column, justify="right")
        table.add_column("")
        for target in self._targets:
            table.add_row(*map(Text, self._row(target)))
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
