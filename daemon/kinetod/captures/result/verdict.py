"""Decides how a target and a capture end. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import format_duration, times

from kinetod.base.errors import VerdictReason
from kinetod.base.safe_text import clean, clean_code

REASON_CHARS = 1024
KEPT = "; what was recorded until then is kept"  # end of a reason, unless nothing was recorded


class EndState(Enum):
    """How far the collection has progressed."""

    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why and how the collection in one target ended. `code` and `reason` are empty for DONE."""

    outcome: EndState
    code: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Final:
    """A target's verdict."""

    verdict: pb.Verdict
    code: str
    reason: str


DONE = Ending(EndState.DONE)
_AGENT_CODES = {"TARGET_EXITING": VerdictReason.TARGET_EXITED.value}


def ending_of_result(result: wire.Result) -> Ending:
    """The ending that the agent's result reports."""
    try:
        outcome = EndState(result.outcome)
    except ValueError:
        return Ending(
            EndState.FAILED, VerdictReason.AGENT_ERROR, f"the agent sent an unknown outcome {result.outcome!r:.40}"
        )
    if outcome is EndState.DONE:
        return DONE
    code = clean_code(_AGENT_CODES.get(result.reason_code, result.reason_code), VerdictReason.AGENT_ERROR)
    return Ending(outcome, code, clean(result.reason, REASON_CHARS) or f"the agent gave no reason beyond {code}")


def ending_of_rejection(rejected: wire.Rejected) -> Ending:
    """The ending for a request that the agent rejected."""
    code = clean_code(rejected.reason_code, VerdictReason.AGENT_ERROR)
    reason = clean(rejected.reason, REASON_CHARS) or f"the agent gave no reason beyond {code}"
    if rejected.busy_capture_id and rejected.busy_capture_id not in reason:
        reason += f" (capture {clean(rejected.busy_capture_id, 64)})"
    return Ending(EndState.FAILED, code, reason)


def iterations_not_reached(pid: int, start: wire.Start, allowed_ns: int) -> Ending:
    """The ending for iterations that did not complete in the allowed time."""
    place = f" from iteration {start.start_iteration} on" if start.start_iteration is not None else ""
    reason = (
        f"process {pid} did not complete {times(start.iterations or 0, 'iteration')}{place} within the "
        f"{format_duration(allowed_ns)} that this daemon allows (kinetod --max-duration)"
    )
    return Ending(EndState.PARTIAL, VerdictReason.ITERATIONS_NOT_REACHED, reason)


def user_profiler_goes_on(pid: int, allowed_ns: int) -> Ending:
    """The ending for a program's own profiler that did not finish in time."""
    waited = format_duration(allowed_ns)
    reason = f"process {pid}'s own torch.profiler was still running after {waited}; trace again once it has finished"
    return Ending(EndState.PARTIAL, "USER_PROFILER_ACTIVE", reason)


def agent_stuck(pid: int, state: pb.TargetState, why: str) -> Ending:
    """The ending for an agent that makes no progress. why: begins with "; ", or is empty."""
    name = pb.TargetState.Name(state).removeprefix("TARGET_STATE_")
    reason = f"the agent of process {pid} was still in state {name} at the deadline{why}"
    return Ending(EndState.PARTIAL, VerdictReason.AGENT_STUCK, reason)


def target_exited(pid: int, *, begun: bool) -> Ending:
    """The ending for a process that exited. begun: whether the capture had begun or was waiting to be started."""
    when = "during the capture" if begun else "before the capture was started"
    return Ending(EndState.PARTIAL, VerdictReason.TARGET_EXITED, f"process {pid} ended {when}")


def worse(ending: Ending, found_later: Ending) -> Ending:
    """The later ending if there was no problem before; otherwise the first problem remains the reason."""
    return found_later if ending.outcome is EndState.DONE else ending


def final(
    ending: Ending,
    *,
    recorded: bool,
    dropped: int,
    made: int = 0,
    unreadable: int = 0,
    cut: Sequence[str] = (),
    decode_error: tuple[str, str] | None = None,
) -> Final:
    """The verdict. recorded: whether there are records of the window; decode_error: code and text of a failure.

    made: all records in the target's counts, including those from before the window.

    cut: notes about incomplete files besides the trace.
    """
    if ending.outcome is EndState.CANCELLED:
        return Final(pb.VERDICT_CANCELLED, ending.code, ending.reason)
    if ending.outcome is EndState.FAILED or (ending.outcome is EndState.PARTIAL and not recorded):
        nothing = "; nothing had been recorded by then"
        if made:
            nothing = f"; none of the records made by then ({made:,}) is from the window, so none is kept"
        if ending.outcome is EndState.FAILED:
            nothing = ""
        return Final(pb.VERDICT_FAILED, ending.code, ending.reason.removesuffix(KEPT) + nothing)
    if decode_error is not None:
        also = f" (before that: {ending.reason})" if ending.reason else ""
        return Final(pb.VERDICT_FAILED, decode_error[0], decode_error[1] + also)
    lost = (
        f"records lost because the buffers were full: {dropped}; request a larger buffer limit, a shorter capture or "
        "fewer activity types"
    )
    if ending.outcome is EndState.PARTIAL:
        parts = [ending.reason, *([lost] if dropped else []), *cut]
        return Final(pb.VERDICT_PARTIAL, ending.code, "; ".join(parts))
    if cut:
        parts = [*cut, *([lost] if dropped else [])]
        return Final(pb.VERDICT_PARTIAL, VerdictReason.FILE_INCOMPLETE, "; ".join(parts))
    if dropped:
        return Final(pb.VERDICT_PARTIAL, VerdictReason.RECORDS_DROPPED, lost)
    if unreadable:
        reason = f"records missing from the trace because they could not be decoded: {unreadable}; see the warnings"
        return Final(pb.VERDICT_PARTIAL, VerdictReason.RECORDS_UNREADABLE, reason)
    return Final(pb.VERDICT_DONE, "", "")


def capture_status(verdicts: Iterable[pb.Verdict]) -> pb.CaptureStatus:
    """The whole capture's status from its targets' verdicts."""
    found = set(verdicts)
    if pb.VERDICT_UNSPECIFIED in found:
        return pb.CAPTURE_STATUS_RUNNING
    if found == {pb.VERDICT_DONE}:
        return pb.CAPTURE_STATUS_DONE
    if found & {pb.VERDICT_DONE, pb.VERDICT_PARTIAL}:
        return pb.CAPTURE_STATUS_PARTIAL
    if found == {pb.VERDICT_CANCELLED}:
        return pb.CAPTURE_STATUS_CANCELLED
    return pb.CAPTURE_STATUS_FAILED
