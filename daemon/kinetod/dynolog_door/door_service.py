"""Reads and carries out the requests of Dynolog's clients. Each passes the gate like the gRPC call it corresponds to.

Theory of operation
    getStatus, getVersion, dcgmProfPause and dcgmProfResume correspond to GetHost: any role on this host is enough.
    setKinetOnDemandRequest corresponds to CreateCapture: processes are found for the caller and authorized one by one
    where they are looked up. The audit log has these calls under those names, with `"via":"dynolog"`.

    Requests are read as Dynolog reads them. It knows five functions, which are the five commands of `dyno`. It does not
    answer anything else (another function, none, or no JSON object): it closes the connection. It answers missing
    arguments and wrong types with {"status": "failed"} or {"status": "failed with exception = ..."}; for
    `dcgmProfPause` a wrong type crashes Dynolog, so there is no answer to copy.

    `pids` and `config` are required, `job_id` is 0 and `process_limit` 1000 unless given, as in Dynolog. Its numbers
    may be fractions, which are truncated; numbers that do not fit are errors here and wrap around there.
"""

import json
import logging
import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kineto_protos import kineto_config
from kineto_protos.kineto_config import KinetoConfigError, RequestedCapture
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import times
from kineto_trace.base.visible_text import one_line
from kineto_trace.store.output_formats import LogFile, parse_log_file

from kinetod import __version__
from kinetod.access.call_gate import Authorizer, CallTracker
from kinetod.base import metrics
from kinetod.base.errors import KinetodError, NotPermitted, Reason, invalid
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.manager import CaptureManager
from kinetod.config.settings import Settings
from kinetod.dynolog_door.log_files import LogFiles
from kinetod.kineto_ipc.poller_registry import PollingProcess, PollingProcesses
from kinetod.permissions.role_policy import Caller
from kinetod.processes.identity import ProcessKey
from kinetod.selection.process_registry import Match, Registry

log = logging.getLogger(__name__)

TRACING_REFUSED = "refuse"  # the value of dynolog.tracing
RECORDER_KEY = "REQUEST_RECORDER"
RECORDERS = {"agent": pb.RECORDER_AGENT, "kineto": pb.RECORDER_KINETO}
LOG_FILE_LABEL = "dynolog.log_file"
_MAX_LABEL_CHARS = 255
_RECORDER_LINE = re.compile(rf"^[ \t]*{RECORDER_KEY}[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_OPERATOR_OPTIONS = ("record_shapes", "with_modules", "with_flops")
_OBJECT_STORES = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
MAX_REFUSED_SHOWN = 16
_NOTHING_TO_PAUSE = (
    "kinetod does not use DCGM's profiling counters, so there is nothing to pause or resume; if DCGM itself uses "
    "them, `dcgmi profile --pause` releases them"
)
Answer = Mapping[str, Any]
NO_JOB = 0
MAX_PIDS = 4096
_DEFAULT_PROCESS_LIMIT = 1000
_MAX_NUMBER = 2**64 - 1  # dyno's --job-id is an unsigned 64-bit number
_ALL_PIDS = frozenset({0})  # older versions of dyno
PREFIX = struct.Struct("=i")
MAX_REQUEST_BYTES = 64 << 10  # dyno's have 300 to 600 bytes; 4096 pids fit


class WrongArgument(ValueError):
    """An argument that Dynolog answers with a failure; the message names it and its expected type."""


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """`getStatus`: dyno status."""


@dataclass(frozen=True, slots=True)
class VersionAsked:
    """`getVersion`: dyno version."""


@dataclass(frozen=True, slots=True)
class DcgmPauseAsked:
    """`dcgmProfPause`: dyno dcgm-pause."""


@dataclass(frozen=True, slots=True)
class DcgmResumeAsked:
    """`dcgmProfResume`: dyno dcgm-resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAsked:
    """`setKinetOnDemandRequest`: dyno gputrace. pids: empty for every process of the job.

    process_limit: how many may be traced; negative means no limit, because of Dynolog's conversion to size_t.
    """

    config: str
    pids: frozenset[int]
    job_id: int
    process_limit: int


Asked = StatusAsked | VersionAsked | DcgmPauseAsked | DcgmResumeAsked | TraceAsked
STATUS, VERSION = "getStatus", "getVersion"
TRACE = "setKinetOnDemandRequest"
PAUSE, RESUME = "dcgmProfPause", "dcgmProfResume"
FUNCTIONS = (STATUS, VERSION, TRACE, PAUSE, RESUME)


def function_of(request: Mapping[str, Any]) -> str:
    """The function that a request names. Raises BadFrame for one that Dynolog does not know."""
    name = request.get("fn")
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise BadFrame(f"unknown function {name!r:.80}" if "fn" in request else "the member fn is missing")
    return name


def arguments_of(function: str, request: Mapping[str, Any]) -> Asked:
    """The request as a value. Raises WrongArgument."""
    if function == STATUS:
        return StatusAsked()
    if function == VERSION:
        return VersionAsked()
    if function == RESUME:
        return DcgmResumeAsked()
    if function == PAUSE:
        _number(request, "duration_s")
        return DcgmPauseAsked()
    return _trace(request)


def _trace(request: Mapping[str, Any]) -> TraceAsked:
    for name in ("config", "pids"):
        if name not in request:
            raise WrongArgument(f"{name} is missing")
    config, listed = request["config"], request["pids"]
    if not isinstance(config, str):
        raise WrongArgument(f"config must be a string, got {config!r:.80}")
    if not isinstance(listed, list):
        raise WrongArgument(f"pids must be a list of numbers, got {listed!r:.80}")
    if len(listed) > MAX_PIDS:
        raise WrongArgument(f"pids has {len(listed)} numbers; at most {MAX_PIDS} are allowed")
    pids = frozenset(_whole(f"pids[{index}]", value) for index, value in enumerate(listed))
    return TraceAsked(
        config=config,
        pids=frozenset() if pids == _ALL_PIDS else pids,
        job_id=_number(request, "job_id", 0),
        process_limit=_number(request, "process_limit", _DEFAULT_PROCESS_LIMIT),
    )


def _number(request: Mapping[str, Any], name: str, default: int | None = None) -> int:
    if name not in request:
        if default is None:
            raise WrongArgument(f"{name} is missing")
        return default
    return _whole(name, request[name])


def _whole(name: str, value: object) -> int:
    if isinstance(value, (int, float)):  # and bool: in Dynolog's library true is 1
        if abs(value) <= _MAX_NUMBER:
            return int(value)
        raise WrongArgument(f"{name} is out of range")
    raise WrongArgument(f"{name} must be a number, got {value!r:.80}")


# Dynolog's frames: an int32 in the byte order of the host, then as many bytes of JSON. Pure.
# rpc/SimpleJsonServer.cpp of facebookincubator/dynolog at c3a231a is the source of this format and of `requests`.
class BadFrame(ValueError):
    """The input is not a request; the message says why. Dynolog does not answer it."""


def body_size(prefix: bytes) -> int:
    """The length of the JSON that follows. Raises BadFrame."""
    (size,) = PREFIX.unpack(prefix)
    if not 0 < size <= MAX_REQUEST_BYTES:
        raise BadFrame(f"a length of {size} bytes; expected 1 to {MAX_REQUEST_BYTES}")
    return int(size)


def read_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a frame. Raises BadFrame."""
    try:
        found = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError and JSONDecodeError too
        raise BadFrame(f"not JSON: {exc}") from exc
    if not isinstance(found, dict) or not found:
        raise BadFrame("not a JSON object with at least one member")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def frame(answer: Mapping[str, Any]) -> bytes:
    """Encodes an answer: compact, members sorted by name, as in Dynolog."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    body = text.encode("utf-8", "replace")
    return PREFIX.pack(len(body)) + body


# Finds the processes that a Dynolog request selects.
#
# Dynolog knows the processes whose libkineto has registered with it; here every process that `kinetoctl trace` would
# select counts, and every one whose libkineto polls this daemon. Dynolog's rules then apply:
# - pids: a process is selected if its own pid or one of an ancestor's is listed. Launchers and helper workers of
#   training processes are left out, as everywhere here.
# - job id: the process must belong to the job, by its environment, the kernel's control groups, or its libkineto's
#   claim.
# - neither: every process without a job that has an agent or polls. A process that was not named is not attached to. In
#   Dynolog the job id 0 means processes without a job with pids as well; here a pid is enough.
# - process_limit: how many get the configuration, by pid; processes that are already being traced do not count.
# A process that polls may have a PID namespace of its own, so the pids it claims count too. The claim can only cause
# the process itself to be traced, by somebody who may trace it.
@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedProcesses:
    """The processes selected by a request. free: pids that may be traced now, as many as the request allows.

    busy: number of others being traced; beyond: number left out because of the request's process_limit.
    """

    free: tuple[int, ...] = ()
    busy: int = 0
    beyond: int = 0


class ProcessMatcher:
    """Finds the processes. polling: the processes that poll, where dynolog.ipc is on."""

    def __init__(self, registry: Registry, polling: PollingProcesses | None = None) -> None:
        self._registry = registry
        self._polling = polling

    async def matched(self, asked: TraceAsked, caller: Caller) -> MatchedProcesses:
        """The processes selected by the request, among those that the caller may see."""
        keys = {each.pid: ProcessKey(each.pid, each.start_time_ns) for each in await self._traceable(asked, caller)}
        found = {pid: self._is_traced(key) for pid, key in keys.items()}
        claimed = self._claimed(asked) if self._polling is not None else {}
        missing = sorted(claimed.keys() - found.keys())
        for each in await self._registry.candidates(missing) if missing else ():
            if each.key == claimed[each.key.pid].key and each.visible_to(caller):
                found[each.key.pid] = self._is_traced(each.key)
        for pid, process in claimed.items():
            if pid in found:
                found[pid] = found[pid] or process.tracing
        return limited(found.items(), asked.process_limit)

    def _is_traced(self, key: ProcessKey) -> bool:
        agent = self._registry.agent(key)
        return agent is not None and bool(agent.capture_id)

    async def _traceable(self, asked: TraceAsked, caller: Caller) -> Iterable[pb.Process]:
        match = Match(
            pids=frozenset(pid for pid in asked.pids if pid > 0),
            children=bool(asked.pids),
            job_ids=frozenset({str(asked.job_id)} if asked.job_id != NO_JOB else ()),
        )
        if asked.pids and not match.pids:
            return ()
        found = await self._registry.processes(match, caller, include_without_agent=False)
        return found if match else (each for each in found if not each.job_id)

    def _claimed(self, asked: TraceAsked) -> dict[int, PollingProcess]:
        assert self._polling is not None
        return {each.key.pid: each for each in self._polling.all() if claims(each, asked)}


def claims(process: PollingProcess, asked: TraceAsked) -> bool:
    """Whether a polling process claims to be one of those selected."""
    if asked.pids and asked.pids.isdisjoint((process.key.pid, *process.pids)):
        return False
    return process.job_id == asked.job_id or (asked.job_id == NO_JOB and bool(asked.pids))


def limited(found: Iterable[tuple[int, bool]], process_limit: int) -> MatchedProcesses:
    """Applies the request's limit to (pid, whether it is being traced)."""
    processes = sorted(found)
    free = [pid for pid, busy in processes if not busy]
    kept = free if process_limit < 0 else free[:process_limit]
    return MatchedProcesses(free=tuple(kept), busy=len(processes) - len(free), beyond=len(free) - len(kept))


# The answers to Dynolog's clients. Pure.
#
# Members are Dynolog's; those that its clients read always have its types: `dyno gputrace` panics unless
# processesMatched is a list. The lists only contain processes that are really being traced. So a process that is busy
# or cannot be traced is in none of them, whereas Dynolog lists it as matched and dyno prints a path that is never
# written.
# One member is ours, `kinetod`: additional information for readers of dyno's output.
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStarted:
    """Result of a trace request. log_file: where the traces will be written, or why they will not."""

    matched: MatchedProcesses
    capture: pb.Capture | None = None
    log_file: str = ""
    notes: Sequence[str] = ()


def status(*, healthy: bool) -> Answer:
    """1, as in Dynolog, if the daemon works, otherwise 0."""
    return {"status": int(healthy)}


def version() -> Answer:
    """The version of this daemon, with a note that it is not Dynolog's."""
    return {"version": __version__, "kinetod": {"daemon": "kinetod"}}


def dcgm() -> Answer:
    """Dynolog's answer without its GPU monitor: it pauses nothing."""
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
        more_processes = times(result.matched.beyond, "more process matches", "more processes match")
        notes.append(f"{more_processes}, beyond process_limit (--process-limit)")
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
    """Dynolog's answer to a missing or invalid argument."""
    return _failed(function, f"failed with exception = {problem}")


def refused(function: str, error: KinetodError) -> Answer:
    """The answer to a request that the policy, limits or the state of this host refuse."""
    more = {"reason": str(error.reason), "message": error.message}
    return {**_failed(function, f"failed: {error.message}"), "kinetod": more}


def internal_error(function: str) -> Answer:
    """The answer to a request that failed with an internal error; the daemon's log has it."""
    return _failed(function, "failed: an internal error of kinetod; its log has the details")


def _failed(function: str, text: str) -> dict[str, Any]:
    return {"status": text, **(_lists([], busy=0) if function == TRACE else {})}


class DynologService:
    """Answers requests. looks: slots for inspecting processes; healthy: whether the daemon works."""

    def __init__(
        self,
        settings: Settings,
        gate: Authorizer,
        call_tracker: CallTracker,
        captures: CaptureManager,
        matcher: ProcessMatcher,
        log_files: LogFiles,
        looks: FairSlots,
        *,
        healthy: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._call_tracker = call_tracker
        self._captures = captures
        self._matcher = matcher
        self._log_files = log_files
        self._looks = looks
        self._healthy = healthy

    async def answer(self, connection: str, body: bytes) -> Answer:
        """The answer to the JSON received on a connection. Raises BadFrame for input that Dynolog would not answer."""
        request = read_object(body)
        function = function_of(request)
        answer, outcome = await self._answer(connection, function, request)
        metrics.DYNOLOG_REQUESTS.labels(function, outcome).inc()
        return answer

    async def _answer(self, connection: str, function: str, request: Mapping[str, Any]) -> tuple[Answer, str]:
        try:
            with self._call_tracker.entered(function, connection, {}, ungated=False):
                asked = arguments_of(function, request)
                return await self._carried_out(connection, asked), "answered"
        except WrongArgument as exc:
            return wrong_argument(function, str(exc)), "refused"
        except KinetodError as exc:
            return refused(function, exc), "refused"
        except Exception:
            log.exception("request %s from a Dynolog client failed", function)
            return internal_error(function), "failed"

    async def _carried_out(self, connection: str, asked: Asked) -> Answer:
        if isinstance(asked, TraceAsked):
            call = pb.CreateCaptureRequest(spec=pb.CaptureSpec(selector=_selector(asked)))
            caller = await self._gate.admit("CreateCapture", connection, {}, call)
            with self._gate.noted("CreateCapture", caller, call) as noted:
                result = await self._trace(asked, caller)
                noted.answer = result.capture
            return started(result)
        caller = await self._gate.admit("GetHost", connection, {}, pb.GetHostRequest())
        with self._gate.noted("GetHost", caller, pb.GetHostRequest()):
            if isinstance(asked, StatusAsked):
                return status(healthy=self._healthy())
            return version() if isinstance(asked, VersionAsked) else dcgm()

    async def _trace(self, asked: TraceAsked, caller: Caller) -> TraceStarted:
        if self._settings.current.dynolog_tracing == TRACING_REFUSED:
            raise NotPermitted(
                Reason.TRACING_REFUSED,
                'this daemon refuses trace requests from Dynolog clients (dynolog.tracing is "refuse"); '
                "use kinetoctl trace",
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
            log.warning("capture %s: its traces are kept only in the store: %s", capture.id, problem)
        log_file = f"not written: {problem}" if problem else ""
        return TraceStarted(matched=matched, capture=capture, log_file=log_file, notes=wanted.notes)


def _selector(asked: TraceAsked) -> pb.Selector:
    """The request's selection, as the audit log shows it."""
    pids = [pid for pid in sorted(asked.pids) if 0 < pid < 2**31]
    return pb.Selector(pids=pids, children=bool(pids), job_ids=[str(asked.job_id)] if asked.job_id != NO_JOB else ())


# Translates the configuration text of a request into a capture. Pure.
#
# The text is libkineto's, so `kineto_protos.kineto_config` reads it, as for `kinetoctl trace --kineto-config`.
# One key is ours, for clients that send text of their own: REQUEST_RECORDER=agent or kineto selects the recorder in
# processes whose libkineto polls this daemon, unless the setting dynolog.tracing refuses that.
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTrace:
    """A capture to create for these pids. log_file: where to write its traces; None: in the store only.

    notes: requested settings that have no effect, for people.
    """

    spec: pb.CaptureSpec
    log_file: LogFile | None
    notes: tuple[str, ...]


def requested_trace(text: str, pids: Iterable[int], now_ns: int) -> RequestedTrace:
    """Reads a configuration text. now_ns: Unix ns. Raises KinetoConfigError."""
    asked = kineto_config.request(kineto_config.parse(_RECORDER_LINE.sub("", text)), now_ns)
    notes = list(asked.notes)
    log_file = _log_file(asked.log_file, notes)
    spec = pb.CaptureSpec(
        selector=pb.Selector(pids=sorted(pids)),
        warmup_ns=asked.warmup or 0,
        start_time_ns=asked.start_at or 0,
        activity_types=asked.activities or (),
        options=_options(asked, notes),
        buffer_limit_bytes=asked.buffer_limit or 0,
        formats=[log_file.format] if log_file is not None else [],
        labels=_labels(asked),
        or_duration_ns=asked.or_duration,
        recorder=_recorder(text),
    )
    if asked.counters is not None:
        set_name, metrics = asked.counters
        spec.counters.CopyFrom(pb.CounterRequest(set=set_name, metrics=metrics))
    if asked.iterations is None:
        spec.duration_ns = asked.duration or kineto_config.DEFAULT_DURATION_NS
    else:
        spec.iterations.CopyFrom(_iterations(asked))
        if asked.or_duration is None:  # as in libkineto for a process that never steps
            spec.or_duration_ns = kineto_config.DEFAULT_DURATION_NS
    return RequestedTrace(spec=spec, log_file=log_file, notes=tuple(notes))


def _recorder(text: str) -> pb.Recorder:
    found = _RECORDER_LINE.findall(text)
    if not found:
        return pb.RECORDER_UNSPECIFIED
    if found[-1].lower() not in RECORDERS:
        raise KinetoConfigError(f"{RECORDER_KEY}: expected {' or '.join(RECORDERS)}, got {found[-1]!r:.80}")
    return RECORDERS[found[-1].lower()]


def _iterations(asked: RequestedCapture) -> pb.IterationWindow:
    return pb.IterationWindow(
        count=asked.iterations,
        start=asked.start_iteration,
        roundup=asked.roundup or 0,
        warmup=asked.warmup_iterations or 0,
    )


def _options(asked: RequestedCapture, notes: list[str]) -> pb.Options:
    chosen = {name: bool(getattr(asked, name)) for name in _OPERATOR_OPTIONS}
    if asked.activities and "cpu_op" not in asked.activities:
        for name in filter(chosen.get, _OPERATOR_OPTIONS):
            chosen[name] = False
            notes.append(f"{asked.origins[name]} has no effect: it describes cpu_op, which is not recorded")
    return pb.Options(**chosen, with_stack=bool(asked.with_stack), profile_memory=bool(asked.memory))


def _labels(asked: RequestedCapture) -> dict[str, str]:
    labels = dict(asked.labels)
    if asked.log_file is not None:
        labels[LOG_FILE_LABEL] = one_line(asked.log_file)[:_MAX_LABEL_CHARS]
    return labels


def _log_file(text: str | None, notes: list[str]) -> LogFile | None:
    if text is None:
        return None
    try:
        if _OBJECT_STORES.match(text):
            raise ValueError(f"{text!r:.200} is not a path on this host; to store traces elsewhere, set upload.url")
        return parse_log_file(text)
    except ValueError as exc:
        notes.append(f"ACTIVITIES_LOG_FILE: {exc}; the trace is kept only in the store")
        return None
