"""What each request of Dynolog's clients does. Every one passes the gate as the gRPC call does that it amounts to.

Theory of operation
    getStatus, getVersion, dcgmProfPause and dcgmProfResume amount to GetHost: any role of this host will do.
    setKinetOnDemandRequest amounts to CreateCapture: processes are found for the caller, and decided about one by one
    where they are looked up. The audit log has these calls under those names, with `"via":"dynolog"`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kineto_protos.kineto_config import KinetoConfigError
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.access.call_gate import Gate
from kinetod.access.call_limits import Doorkeeper
from kinetod.base import metrics
from kinetod.base.errors import KinetodError, NotPermitted, Reason, invalid
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.manager import CaptureManager
from kinetod.config.settings import Settings
from kinetod.dynolog_door import answers, requests
from kinetod.dynolog_door.answers import Answer, TraceStarted
from kinetod.dynolog_door.json_frames import read_object
from kinetod.dynolog_door.log_files import LogFiles
from kinetod.dynolog_door.process_matching import NO_JOB, ProcessMatcher
from kinetod.dynolog_door.requests import Asked, StatusAsked, TraceAsked, VersionAsked, WrongArgument
from kinetod.dynolog_door.trace_request import requested_trace
from kinetod.permissions.role_policy import Caller

log = logging.getLogger(__name__)

TRACING_REFUSED = "refuse"  # the value of dynolog.tracing


class DynologService:
    """Answers requests. looks: slots for inspecting processes; healthy: whether the daemon works."""

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        doorkeeper: Doorkeeper,
        captures: CaptureManager,
        matcher: ProcessMatcher,
        log_files: LogFiles,
        looks: FairSlots,
        *,
        healthy: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._doorkeeper = doorkeeper
        self._captures = captures
        self._matcher = matcher
        self._log_files = log_files
        self._looks = looks
        self._healthy = healthy

    async def answer(self, connection: str, body: bytes) -> Answer:
        """The answer to the JSON that came on a connection. Raises BadFrame for what Dynolog would not answer."""
        request = read_object(body)
        function = requests.function_of(request)
        answer, outcome = await self._answer(connection, function, request)
        metrics.dynolog_request(function, outcome)
        return answer

    async def _answer(self, connection: str, function: str, request: Mapping[str, Any]) -> tuple[Answer, str]:
        try:
            with self._doorkeeper.entered(function, connection, {}, ungated=False):
                asked = requests.arguments_of(function, request)
                return await self._carried_out(connection, asked), "answered"
        except WrongArgument as exc:
            return answers.wrong_argument(function, str(exc)), "refused"
        except KinetodError as exc:
            return answers.refused(function, exc), "refused"
        except Exception:
            log.exception("the request %s of a client of Dynolog failed", function)
            return answers.internal_error(function), "failed"

    async def _carried_out(self, connection: str, asked: Asked) -> Answer:
        if isinstance(asked, TraceAsked):
            call = pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=_selector(asked)))
            caller = await self._gate.admit("CreateCapture", connection, {}, call)
            with self._gate.noted("CreateCapture", caller, call) as noted:
                result = await self._trace(asked, caller)
                noted.answer = result.capture
            return answers.started(result)
        caller = await self._gate.admit("GetHost", connection, {}, pb.GetHostRequest())
        with self._gate.noted("GetHost", caller, pb.GetHostRequest()):
            if isinstance(asked, StatusAsked):
                return answers.status(healthy=self._healthy())
            return answers.version() if isinstance(asked, VersionAsked) else answers.dcgm()

    async def _trace(self, asked: TraceAsked, caller: Caller) -> TraceStarted:
        if self._settings.current.dynolog_tracing == TRACING_REFUSED:
            raise NotPermitted(
                Reason.TRACING_REFUSED,
                'this daemon traces nothing for clients of Dynolog: dynolog.tracing is "refuse"; use kinetoctl trace',
            )
        try:
            wanted = requested_trace(asked.config, (), time.time_ns())
        except KinetoConfigError as exc:
            raise invalid("config", str(exc)) from exc
        async with self._looks.turn():
            matched = await self._matcher.matched(asked, caller)
        if not matched.free:
            return TraceStarted(matched=matched, notes=wanted.notes)
        problem = ""
        if wanted.log_file is not None:
            problem = await self._log_files.problem(wanted.log_file, caller)
        wanted.spec.selector.pids[:] = matched.free
        capture = await self._captures.create(wanted.spec, "", caller, each_by_itself=True)
        if wanted.log_file is not None and not problem:
            self._log_files.promise(capture, wanted.log_file, caller)
        if problem:
            log.warning("capture %s: its traces are in the store only: %s", capture.id, problem)
        log_file = f"not written: {problem}" if problem else ""
        return TraceStarted(matched=matched, capture=capture, log_file=log_file, notes=wanted.notes)


def _selector(asked: TraceAsked) -> pb.Selector:
    """The request's selection, as the audit log shows it."""
    pids = [pid for pid in sorted(asked.pids) if 0 < pid < 2**31]
    return pb.Selector(pids=pids, children=bool(pids), job_ids=[str(asked.job_id)] if asked.job_id != NO_JOB else ())
