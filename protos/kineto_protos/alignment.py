"""Chooses one start iteration for all processes of a capture, so that they record the same iterations. Pure.

Theory of operation
    `plan` gets several samples of the iteration of every target. It takes the fastest target and finds the first
    iteration that all can still reach: the current one, plus those that pass during delivery of the request, plus those
    that pass while the sources start (these become warm-up). Each agent still checks for itself, and reports if it is
    late.

    Counts are comparable if the agents have counted since the program started. An agent attached to a running process
    counts from then on; if one takes part, each target gets its own number for the same iteration:
    the median difference of the counts gives the offset between them. This is correct for processes in lockstep.

    A target that cannot reach the common start in the allowed time, at its observed pace, is another program: such
    targets are aligned among themselves, with a warning. The daemon's limit applies to a start requested by the caller.
    A target that has not finished an iteration gets the request unchanged.

    The daemon plans for the processes of its host, a client for those of many hosts.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

DELIVERY_S = 0.25  # until the last agent has received the request: its thread may have to wait for the interpreter
SOURCES_S = 0.5  # until its sources record; torch's profiler takes the longest
NEVER = -1  # the count of a target that has not finished an iteration


class Wanted(Protocol):
    """The fields of a request about iterations: a named tuple."""

    @property
    def start_iteration(self) -> int | None:
        """None: the next one."""

    @property
    def iteration_roundup(self) -> int:
        """The start is rounded up to a multiple of this; 0 or 1: not rounded."""

    @property
    def warmup_iterations(self) -> int:
        """Iterations before it that are recorded but not kept."""


R = TypeVar("R", bound=Wanted)


@dataclass(frozen=True, slots=True)
class Sample:
    """The current iteration of each target; -1 if it has not finished one."""

    time_ns: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """The iterations for one target. start_iteration None: its own next one."""

    start_iteration: int | None
    roundup: int
    warmup_iterations: int
    warning: str = ""

    def applied(self, request: R) -> R:
        """The same request with these iterations."""
        tuple_of_it: Any = request
        replaced: R = tuple_of_it._replace(
            start_iteration=self.start_iteration,
            iteration_roundup=self.roundup,
            warmup_iterations=self.warmup_iterations,
        )
        return replaced


def plan(
    samples: Sequence[Sample], start: Wanted, *, comparable: bool, patience_ns: int, delivery_s: float = DELIVERY_S
) -> list[Aligned]:
    """One entry per target. samples: at least one. comparable: all agents count from the same iteration on.

    patience_ns: how long a target may take to reach the common start before it counts as another program.
    delivery_s: time until the last target has received its request.
    """
    own = Aligned(
        start_iteration=start.start_iteration,
        roundup=start.iteration_roundup,
        warmup_iterations=start.warmup_iterations,
    )
    targets = _targets(samples, comparable=comparable, patience_ns=patience_ns)
    result = {target.number: replace(own, warning=_NOT_STEPPED) for target in targets}
    left = [target for target in targets if target.count != NEVER]
    stepping = len(left)
    while left:
        current = max(target.position for target in left)
        first, warmup = _common_start(current, max(target.pace for target in left), start, delivery_s)
        group = [
            target
            for target in left
            if target.position == current
            or start.start_iteration is not None
            or first - target.position <= target.reach
        ]
        for target in group:
            aligned = own
            if len(group) > 1:
                roundup = start.iteration_roundup if comparable else 0  # the agent rounds again if it is late
                aligned = Aligned(start_iteration=first + target.offset, roundup=roundup, warmup_iterations=warmup)
            result[target.number] = replace(aligned, warning=_warning(first, len(group), stepping, start))
        taken = {target.number for target in group}
        left = [target for target in left if target.number not in taken]
    return [result[target.number] for target in targets]


_NOT_STEPPED = "not aligned with the other processes: this one had not finished an iteration"


def _common_start(current: int, pace: float, start: Wanted, delivery_s: float) -> tuple[int, int]:
    """The first iteration and the warm-up for targets, the furthest of which is at `current`."""
    warmup = max(start.warmup_iterations, 1, math.ceil(pace * SOURCES_S))
    earliest = current + warmup + 1 + math.ceil(pace * delivery_s)
    first = max(earliest, start.start_iteration or 0)
    multiple = start.iteration_roundup
    return first if multiple <= 1 else -(-first // multiple) * multiple, warmup


def _warning(first: int, group: int, stepping: int, start: Wanted) -> str:
    if group < stepping:
        return (
            f"recorded the same iterations as {group - 1} of the {stepping - 1} other processes; the rest are too many "
            "iterations away to get there within the time allowed (kinetod --max-duration)"
        )
    wanted = start.start_iteration
    if group > 1 and wanted is not None and first > wanted and first - wanted >= max(start.iteration_roundup, 1):
        return f"it was too late to record iteration {wanted} in all {group} processes: recorded from {first} on"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    number: int
    count: int  # the latest; -1: none
    offset: int  # how far its count is ahead of others' for the same iteration
    pace: float  # iterations per second; 0: none ended during sampling, so hardly more than one passes
    reach: float  # the most iterations that it could do in the allowed time

    @property
    def position(self) -> int:
        """Its count, converted to that of the first target."""
        return self.count - self.offset


def _targets(samples: Sequence[Sample], *, comparable: bool, patience_ns: int) -> list[_Target]:
    latest = samples[-1].counts
    observed_ns = samples[-1].time_ns - samples[0].time_ns
    reference = next((number for number, count in enumerate(latest) if count != NEVER), 0)
    found = []
    for number, count in enumerate(latest):
        pace = _pace(samples, number)
        highest = pace or (1e9 / observed_ns if observed_ns > 0 else math.inf)
        found.append(
            _Target(
                number=number,
                count=count,
                offset=0 if comparable else _offset(samples, number, reference),
                pace=pace,
                reach=highest * patience_ns / 1e9,
            )
        )
    return found


def _offset(samples: Sequence[Sample], number: int, reference: int) -> int:
    pairs = [(sample.counts[number], sample.counts[reference]) for sample in samples]
    apart = [ours - theirs for ours, theirs in pairs if NEVER not in (ours, theirs)]
    return statistics.median_low(apart) if apart else 0


def _pace(samples: Sequence[Sample], number: int) -> float:
    seen = [(sample.time_ns, sample.counts[number]) for sample in samples if sample.counts[number] != NEVER]
    if len(seen) < 2 or seen[-1][1] <= seen[0][1]:
        return 0.0
    return (seen[-1][1] - seen[0][1] + 1) * 1e9 / max(seen[-1][0] - seen[0][0], 1)
