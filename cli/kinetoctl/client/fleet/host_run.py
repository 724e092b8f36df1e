"""The part of one host in a capture of many hosts, and the outcome of all parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration

from kinetoctl.client.host_targets import Place
from kinetoctl.client.tracing import FileKey, has_ended
from kinetoctl.errors import CliError, NotFound
from kinetoctl.exit_codes import ExitCode

# Offsets of the clocks of hosts from ours. Pure.
#
# A round trip has four times: we send, the host receives, the host answers, we receive. No message arrives before it is
# sent. This bounds the offset, which is to be added to the host's times, from both sides; the distance between the
# bounds is the time that the trip spent outside the host. The shortest of several round trips has the tightest bounds;
# those of the others hold too, and may be tighter on one side. If no offset fits all of them, the clock has moved
# between them.
#
# The clocks are measured before the start of a capture and after its end. Two clocks drift apart by at most DRIFT_PPM,
# so a measurement loses precision with its age: the one that is more precise for the window is used. If the two differ
# by more than that allows, the clock was set or slewed in between, and the offset is between the two.
DRIFT_PPM = 100  # of two clocks, each within the 50 ppm of ordinary quartz
READING_NS = 1_000  # error of one reading of a clock
SLACK_NS = 100_000  # allowed contradiction between readings: clocks are slewed, and read in steps
FAR_NS = 1_000_000_000  # a larger offset is reported: no host with a synchronised clock is that far off


class RoundTrip(NamedTuple):
    """One reading of a host's clock. sent_ns, returned_ns: by our clock; received_ns, answered_ns: by the host's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int

    @property
    def travelled_ns(self) -> int:
        """The time that the trip spent outside the host, in ns."""
        return (self.returned_ns - self.sent_ns) - (self.answered_ns - self.received_ns)


@dataclass(frozen=True, slots=True)
class Offset:
    """The offset of a host's clock. offset_ns: to be added to the host's times; uncertainty_ns: its largest error.

    at_ns: when it was measured, in Unix ns by our clock. trip_ns: the complete round trip.
    """

    offset_ns: int
    uncertainty_ns: int
    at_ns: int = 0
    trip_ns: int = 0

    def __str__(self) -> str:
        sign = "-" if self.offset_ns < 0 else "+"
        return f"{sign}{format_duration(abs(self.offset_ns))} ±{format_duration(self.uncertainty_ns)}"


class UnusableClock(Exception):
    """A clock for which no start time can be computed; the message says why."""


def measured(trips: Sequence[RoundTrip]) -> Offset:
    """The offset from at least one round trip. Raises UnusableClock."""
    if any(trip.received_ns <= 0 or trip.answered_ns < trip.received_ns or trip.travelled_ns < 0 for trip in trips):
        raise UnusableClock("its clock went backwards or stopped while it was being read")
    low = max(trip.sent_ns - trip.received_ns for trip in trips)
    high = min(trip.returned_ns - trip.answered_ns for trip in trips)
    shortest = min(trips, key=lambda trip: trip.travelled_ns)
    if low > high + SLACK_NS + _drift_ns(trips[0].sent_ns, trips[-1].returned_ns):
        raise UnusableClock(f"its clock moved by {format_duration(low - high)} or more while it was being read")
    uncertainty_ns = (abs(high - low) + 1) // 2 + READING_NS
    return Offset((low + high) // 2, uncertainty_ns, shortest.sent_ns, shortest.returned_ns - shortest.sent_ns)


def _drift_ns(first_ns: int, second_ns: int) -> int:
    """How far two clocks may drift apart between two times, in ns."""
    return abs(second_ns - first_ns) * DRIFT_PPM // 1_000_000


def joined(before: Offset, after: Offset, at_ns: int) -> tuple[Offset, str]:
    """One offset for a time between two measurements, and a warning if they contradict each other."""
    apart_ns = abs(after.offset_ns - before.offset_ns)
    if apart_ns <= before.uncertainty_ns + after.uncertainty_ns + _drift_ns(before.at_ns, after.at_ns):
        then = (
            replace(each, uncertainty_ns=each.uncertainty_ns + _drift_ns(each.at_ns, at_ns)) for each in (before, after)
        )
        return min(then, key=lambda offset: offset.uncertainty_ns), ""
    low = min(offset.offset_ns - offset.uncertainty_ns for offset in (before, after))
    high = max(offset.offset_ns + offset.uncertainty_ns for offset in (before, after))
    middle = Offset((low + high) // 2, (high - low + 1) // 2, before.at_ns, max(before.trip_ns, after.trip_ns))
    return middle, (
        f"its clock moved by {format_duration(apart_ns)} during the capture: its times may be off by "
        f"{format_duration(middle.uncertainty_ns)}"
    )


LOST = "HOST_LOST"  # the reason code of a process whose daemon went away before its verdict
STARTED_APART_NS = 5_000_000  # windows that start farther from the common start than this are reported


@dataclass(slots=True, eq=False)
class HostRun:
    """One host. error: why it does not take part, or no longer; clock: None if it was not measured.

    paths: its verified files on this machine; problems: one error per missing file.
    """

    place: Place
    capture: pb.Capture | None = None
    error: CliError | None = None
    clock: Offset | None = None
    started: bool = False
    warnings: list[str] = field(default_factory=list)
    paths: dict[FileKey, Path] = field(default_factory=dict)
    problems: list[CliError] = field(default_factory=list)

    @property
    def targets(self) -> Sequence[pb.Target]:
        """Its processes; empty if it has no capture."""
        return () if self.capture is None else self.capture.targets

    @property
    def is_ready(self) -> bool:
        """Whether a process on it is waiting for the start."""
        return self.error is None and any(target.state != pb.TARGET_STATE_ENDED for target in self.targets)

    @property
    def is_wholly_ready(self) -> bool:
        """Whether all its processes are waiting for the start."""
        return self.is_ready and all(target.state != pb.TARGET_STATE_ENDED for target in self.targets)

    @property
    def is_running(self) -> bool:
        """Whether it has a capture that is not known to have ended."""
        return self.capture is not None and not has_ended(self.capture)

    def is_lost(self, target: pb.Target) -> bool:
        """Whether the outcome of a process is unknown because its host was lost."""
        return self.error is not None and target.state != pb.TARGET_STATE_ENDED


class FleetProgress(Protocol):
    """How a capture of many hosts reports its progress."""

    def note(self, text: str) -> None:
        """A message for the person who waits."""

    def update(self, member: HostRun) -> None:
        """The state of a host has changed."""

    def fetched(self, files: int, total: int, size_bytes: int) -> None:
        """The number of files that have arrived, of how many, and their total size."""


class Rank(NamedTuple):
    """One process of a capture of many hosts."""

    member: HostRun
    target: pb.Target


@dataclass(slots=True, eq=False)
class Fleet:
    """A capture of many hosts. unmet: why it was not started; answer: where the time of all went, if known.

    start_ns: when it started, in Unix ns by our clock; 0 if there was no common start time.
    """

    id: str
    members: list[HostRun]
    ranks: frozenset[int] = frozenset()  # the requested ones
    start_ns: int = 0
    unmet: str = ""
    interrupted: bool = False
    problems: list[CliError] = field(default_factory=list)  # with the files of all hosts together
    answer: pb.CaptureAnswer = field(default_factory=pb.CaptureAnswer)

    def processes(self) -> Iterator[Rank]:
        """The processes of all hosts, in their order."""
        for member in self.members:
            for target in member.targets:
                yield Rank(member, target)

    def missing_ranks(self) -> list[int]:
        """The requested ranks that no host has."""
        found = {rank.target.process.rank for rank in self.processes() if rank.target.process.HasField("rank")}
        return sorted(self.ranks - found)

    def has_no_part(self, member: HostRun) -> bool:
        """Whether the host has none of the requested ranks."""
        return isinstance(member.error, NotFound) and member.capture is None and bool(self.ranks)

    def failed(self) -> list[HostRun]:
        """The hosts that should have taken part but did not, or not until the end."""
        return [member for member in self.members if member.error is not None and not self.has_no_part(member)]

    def counted(self) -> int:
        """The number of hosts that count for a requirement."""
        return sum(not self.has_no_part(member) for member in self.members)

    def spread_ns(self) -> int | None:
        """The time between the first and the last start of a window, in ns by our clock; None if unknown."""
        begins = [begin for rank in self.processes() if (begin := began_ns(rank)) is not None]
        return max(begins) - min(begins) if begins else None

    def uncertainty_ns(self) -> int | None:
        """The largest clock uncertainty of the hosts with a trace, in ns; None if that of any is unknown."""
        clocks = [member.clock for member in self.members if any(target.files for target in member.targets)]
        known = [clock.uncertainty_ns for clock in clocks if clock is not None]
        return max(known, default=None) if len(known) == len(clocks) else None

    def all_problems(self) -> list[CliError]:
        """Those of all hosts together, then those of each."""
        return [*self.problems, *(problem for member in self.members for problem in member.problems)]

    def exit_code(self) -> ExitCode:
        """DONE only if every process of every host is done, and all requested files are here."""
        if self.interrupted:
            return ExitCode.INTERRUPTED
        verdicts = [rank.target.verdict for rank in self.processes()]
        if not any(verdict in (pb.VERDICT_DONE, pb.VERDICT_PARTIAL) for verdict in verdicts):
            return self._failed_as(verdicts)
        problems = self.all_problems()
        if problems and not any(member.paths for member in self.members):
            return problems[0].exit_code
        whole = all(verdict == pb.VERDICT_DONE for verdict in verdicts) and not self.missing_ranks()
        return ExitCode.DONE if whole and not problems and not self.failed() else ExitCode.PARTIAL

    def _failed_as(self, verdicts: Sequence[int]) -> ExitCode:
        if verdicts and not self.unmet and all(verdict == pb.VERDICT_CANCELLED for verdict in verdicts):
            return ExitCode.CANCELLED
        codes = {member.error.exit_code for member in self.members if member.error is not None}
        return codes.pop() if len(codes) == 1 and not verdicts else ExitCode.FAILED


def stored_clock(capture: pb.Capture) -> Offset | None:
    """The clock offset that was measured when the capture started, or None."""
    if not capture.HasField("clock"):
        return None
    offset_ns = capture.clock.offset_ns
    return Offset(offset_ns, capture.clock.uncertainty_ns, at_ns=capture.created_ns + offset_ns)


def began_ns(rank: Rank) -> int | None:
    """When the window of a process started, in Unix ns by our clock; None without a trace or a known clock."""
    begin_ns = rank.target.summary.window_start_ns
    if not begin_ns or rank.member.clock is None:
        return None
    return int(begin_ns + rank.member.clock.offset_ns)
