"""When the hosts of a capture start: a time, or an iteration, that all of them can still reach. Pure."""

from typing import NamedTuple

from kineto_protos.units import format_duration

from kinetoctl.errors import UsageProblem

WARMUP_NS = 500_000_000  # the sources record before the window starts, so that it starts exactly on time
TAKEN_UP_NS = 250_000_000  # until the last agent has accepted its request: its thread may wait for the GIL
TRIPS = 3  # a request may take longer than the shortest round trip
ROUNDS = 2  # to send all requests may take longer than to ask all hosts for the time
BUSY_SHARE, MAX_BUSY_NS = 4, 2_000_000_000  # of the time that getting ready took: hosts that are busy take longer
REQUIREMENTS = ("all", "quorum", "any")


class Iterations(NamedTuple):
    """The requested iterations, as `kineto_protos.alignment.plan` takes them."""

    start_iteration: int | None
    iteration_roundup: int
    warmup_iterations: int


def delivery_ns(*, trip_ns: int, round_ns: int, armed_ns: int) -> int:
    """How long it takes until every agent has accepted its request, in ns.

    trip_ns: the longest round trip to a host; round_ns: the time to call each host once; armed_ns: how long the slowest
    host took to get ready.
    """
    busy_ns = min(armed_ns // BUSY_SHARE, MAX_BUSY_NS)
    return TAKEN_UP_NS + TRIPS * trip_ns + ROUNDS * round_ns + busy_ns


def common_start_ns(now_ns: int, *, warmup_ns: int, delivered_ns: int, wanted_ns: int = 0) -> int:
    """When the window starts on all hosts, in Unix ns by our clock. wanted_ns: the requested time; 0 for the earliest.

    delivered_ns: how long it takes until all have their request. Raises UsageProblem if wanted_ns is too near.
    """
    earliest_ns = now_ns + warmup_ns + delivered_ns
    if not wanted_ns:
        return earliest_ns
    if wanted_ns < earliest_ns:
        raise UsageProblem(
            f"--start-at is {format_duration(earliest_ns - wanted_ns)} too near: all hosts together need "
            f"{format_duration(earliest_ns - now_ns)} from now, once their processes are ready"
        )
    return wanted_ns


def unmet(requirement: str, *, hosts: int, begun: int, whole: int) -> str:
    """Why a requirement (one of REQUIREMENTS) is not met, or empty if it is.

    begun: number of hosts with a process that is ready; whole: with all processes ready.
    """
    if requirement == "all" and whole < hosts:
        return f"only {whole} of {hosts} hosts are ready with all their processes, but --require all needs every one"
    if requirement == "quorum" and 2 * begun <= hosts:
        return f"only {begun} of {hosts} hosts are ready, but --require quorum needs more than half"
    return "" if begun else "no host has a process that is ready"
