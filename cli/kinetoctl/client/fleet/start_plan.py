"""When the hosts of a capture begin: a moment, or an iteration, that all of them can still make. Pure."""

from typing import NamedTuple

from kineto_protos.units import format_duration

from kinetoctl.errors import UsageProblem

WARMUP_NS = 500_000_000  # the sources record before the window begins, so that it begins exactly where it should
TAKEN_UP_NS = 250_000_000  # until the last agent has taken its request up: its thread may wait for the interpreter
TRIPS = 3  # a request may take longer than the shortest round trip
ROUNDS = 2  # to send all requests may take longer than to ask all hosts for the time
BUSY_SHARE, MAX_BUSY_NS = 4, 2_000_000_000  # of the time that getting ready took: hosts that are busy take longer
REQUIREMENTS = ("all", "quorum", "any")


class Iterations(NamedTuple):
    """The iterations that are asked for, as `kineto_protos.alignment.plan` takes them."""

    start_iteration: int | None
    iteration_roundup: int
    warmup_iterations: int


def delivery_ns(*, trip_ns: int, round_ns: int, armed_ns: int) -> int:
    """Until every host has its request and every agent has taken it up.

    trip_ns: the longest round trip to a host; round_ns: what asking each host once took; armed_ns: how long the slowest
    one took to get ready.
    """
    busy_ns = min(armed_ns // BUSY_SHARE, MAX_BUSY_NS)
    return TAKEN_UP_NS + TRIPS * trip_ns + ROUNDS * round_ns + busy_ns


def common_start_ns(now_ns: int, *, warmup_ns: int, delivered_ns: int, wanted_ns: int = 0) -> int:
    """When the window begins everywhere, by our clock. wanted_ns: when it shall; 0: as soon as all can.

    delivered_ns: until all have their request. Raises UsageProblem if the wanted time is too near.
    """
    earliest_ns = now_ns + warmup_ns + delivered_ns
    if not wanted_ns:
        return earliest_ns
    if wanted_ns < earliest_ns:
        raise UsageProblem(
            f"--start-at is {format_duration(earliest_ns - wanted_ns)} too near: all hosts together need "
            f"{format_duration(earliest_ns - now_ns)} from now, when their processes are ready"
        )
    return wanted_ns


def unmet(requirement: str, *, hosts: int, begun: int, whole: int) -> str:
    """What is missing from a requirement; empty: nothing. begun: hosts with a process that is ready; whole: with all.

    requirement: one of REQUIREMENTS.
    """
    if requirement == "all" and whole < hosts:
        return f"only {whole} of {hosts} hosts are ready with all their processes, and --require all wants every one"
    if requirement == "quorum" and 2 * begun <= hosts:
        return f"only {begun} of {hosts} hosts are ready, and --require quorum wants more than half"
    return "" if begun else "no host has a process that is ready"
