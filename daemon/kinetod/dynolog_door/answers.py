"""The answers to Dynolog's clients. Pure.

Theory of operation
    Members are Dynolog's; those that its clients read have its types whatever happened: `dyno gputrace` ends with a
    panic unless processesMatched is a list. The lists of processes have those only that are really being traced. So a
    process that is busy or cannot be traced is in none of them, where Dynolog lists it as matched and dyno prints a
    path for it that nobody writes.

    One member is ours, `kinetod`: what there is to know besides, for whoever reads dyno's output.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.base.errors import KinetodError
from kinetod.dynolog_door import requests
from kinetod.dynolog_door.process_matching import MatchedProcesses

MAX_REFUSED_SHOWN = 16
_NOTHING_TO_PAUSE = (
    "kinetod does not measure with DCGM's profiling counters, so it has nothing to pause or to resume; where DCGM "
    "itself holds them, `dcgmi profile --pause` frees them"
)
Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStarted:
    """What became of a request to trace. log_file: where the traces will be, or why they will not."""

    matched: MatchedProcesses
    capture: pb.Capture | None = None
    log_file: str = ""
    notes: Sequence[str] = ()


def status(*, healthy: bool) -> Answer:
    """1 as in Dynolog if the daemon works, otherwise 0."""
    return {"status": int(healthy)}


def version() -> Answer:
    """The version of this daemon, and that it is not Dynolog's."""
    return {"version": __version__, "kinetod": {"daemon": "kinetod"}}


def dcgm() -> Answer:
    """What Dynolog says when it was started without its GPU monitor: it pauses nothing."""
    return {"status": False, "kinetod": {"notes": [_NOTHING_TO_PAUSE]}}


def started(result: TraceStarted) -> Answer:
    """The answer to a request to trace that was carried out as far as possible."""
    targets = result.capture.targets if result.capture is not None else ()
    armed = [target.pid for target in targets if target.verdict == pb.VERDICT_UNSPECIFIED]
    more: dict[str, Any] = {}
    if result.capture is not None:
        more["capture"] = result.capture.id
    if result.log_file:
        more["log_file"] = result.log_file
    notes = list(result.notes)
    if result.matched.beyond:
        notes.append(f"{result.matched.beyond} more processes match; process_limit (--process-limit) leaves them out")
    if notes:
        more["notes"] = notes
    refused = [target for target in targets if target.verdict != pb.VERDICT_UNSPECIFIED]
    if refused:
        more["refused"] = [
            {"pid": target.pid, "reason": target.reason_code, "message": target.reason}
            for target in refused[:MAX_REFUSED_SHOWN]
        ]
    return {**_lists(armed, busy=result.matched.busy), **({"kinetod": more} if more else {})}


def _lists(armed: Iterable[int], *, busy: int) -> dict[str, Any]:
    pids = list(armed)
    return {
        "processesMatched": pids,
        "activityProfilersTriggered": pids,
        "activityProfilersBusy": busy,
        "eventProfilersTriggered": [],
        "eventProfilersBusy": 0,
    }


def wrong_argument(function: str, problem: str) -> Answer:
    """Dynolog's answer to an argument that is missing or wrong."""
    return _failed(function, f"failed with exception = {problem}")


def refused(function: str, error: KinetodError) -> Answer:
    """The answer to a request that policy, limits or the state of this host refuse."""
    more = {"reason": str(error.reason), "message": error.message}
    return {**_failed(function, f"failed: {error.message}"), "kinetod": more}


def internal_error(function: str) -> Answer:
    """The answer to a request that an error of ours ended; the daemon's log has it."""
    return _failed(function, "failed: an internal error of kinetod; its log has the details")


def _failed(function: str, text: str) -> dict[str, Any]:
    return {"status": text, **(_lists([], busy=0) if function == requests.TRACE else {})}
