"""Checks capture requests and derives their limits: pure functions. Times are Unix ns."""

from typing import Optional

from kineto_agent.control.events import Refusal, StartRequested
from kineto_agent.protocol import wire

MAX_LATE_START_NS = 10_000_000_000  # as in Kineto: a start time further in the past is an error
WARMUP_SLACK_NS = 1_000_000_000  # a warm-up may lose this much: delivery takes milliseconds, not seconds
NO_STEP_NS = 60_000_000_000  # a loop without a new iteration for this long is evaluating, saving or hanging
NO_STEP_ITERATIONS = 20  # this many median iterations are added to NO_STEP_NS
OR_DURATION_ITERATIONS = 3  # iterations longer than --or-duration are no reason to give up on iterations
NEVER_STEPPED = (
    "this process has not finished an iteration yet, so none can be counted: ask for a duration, give a fallback "
    "(--or-duration 5s), wait for the first optimizer step, or call kineto_agent.step() once per iteration"
)
_S = 1_000_000_000


def problem_of(event: StartRequested) -> Optional[Refusal]:
    """Why this request can never be served as it stands, or None."""
    request = event.request
    if (request.duration_ns is None) == (request.iterations is None):
        return Refusal("INVALID_REQUEST", "a capture needs either a duration or a number of iterations")
    if request.duration_ns is not None and request.duration_ns <= 0:
        return Refusal("INVALID_REQUEST", "duration_ns is %d: it must be above 0" % request.duration_ns)
    if request.iterations is not None and request.iterations <= 0:
        return Refusal("INVALID_REQUEST", "iterations is %d: it must be above 0" % request.iterations)
    if request.or_duration_ns is not None and request.or_duration_ns <= 0:
        return Refusal("INVALID_REQUEST", "or_duration_ns is %d: it must be above 0" % request.or_duration_ns)
    for name in ("warmup_ns", "warmup_iterations", "iteration_roundup", "start_time_ns", "start_iteration"):
        value = getattr(request, name)
        if value is not None and value < 0:
            return Refusal("INVALID_REQUEST", "%s is %d: it must not be negative" % (name, value))
    if event.refusal is not None:
        return event.refusal
    if request.iterations is not None:
        return _never_stepped(event)
    return _start_time_past(request, event.now_ns)


def _never_stepped(event: StartRequested) -> Optional[Refusal]:
    if event.iteration >= 0 or event.request.or_duration_ns is not None or may_still_step(event):
        return None
    return Refusal("NEVER_STEPPED", NEVER_STEPPED)


def may_still_step(event: StartRequested) -> bool:
    """Whether the first iteration of this process may still come: its optimizers have not been watched for long."""
    return 0 <= event.now_ns - event.hooked_ns < patience_ns(event.request, event.step_ns)


def patience_ns(request: wire.Start, step_ns: int) -> int:
    """How long a capture by iteration waits for the next iteration. step_ns: median of the latest, 0 if unknown."""
    if request.or_duration_ns is None:
        return NO_STEP_NS + NO_STEP_ITERATIONS * step_ns
    return max(request.or_duration_ns, OR_DURATION_ITERATIONS * step_ns)


def instead_of_iterations(request: wire.Start) -> wire.Start:
    """The same capture by duration: or_duration_ns, which must be set."""
    return request._replace(
        duration_ns=request.or_duration_ns,
        iterations=None,
        start_iteration=None,
        iteration_roundup=0,
        warmup_iterations=0,
        or_duration_ns=None,
    )


def _start_time_past(request: wire.Start, now_ns: int) -> Optional[Refusal]:
    if request.start_time_ns == 0:
        return None
    late_ns = now_ns - request.start_time_ns
    if late_ns > MAX_LATE_START_NS:
        reason = "the start time was %.1f s ago when the request arrived: ask for a later one" % (late_ns / _S)
        return Refusal("START_TIME_PAST", reason)
    missing_ns = late_ns + request.warmup_ns
    if request.warmup_ns and missing_ns > WARMUP_SLACK_NS:
        return Refusal(
            "START_TIME_PAST",
            "the warm-up of %.3f s does not fit: it should have begun %.3f s before the request arrived; "
            "ask for a later start time or a shorter warm-up" % (request.warmup_ns / _S, missing_ns / _S),
        )
    return None
