"""The Profiler service: each method translates one call to the daemon's parts."""

import contextvars
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.telemetry_ids import TRACE_PARENT

from kinetod import __version__
from kinetod.access.call_gate import Authorizer
from kinetod.agents.agent_hub import AgentHub
from kinetod.base.errors import Reason
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.manager import CaptureManager
from kinetod.config.settings import Settings
from kinetod.gpus.gpu_reader import DEADLINE_S, GpuReader
from kinetod.gpus.gpu_types import LibraryState
from kinetod.permissions.caller_limits import Shares
from kinetod.permissions.role_policy import Caller, Role
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin
from kinetod.processes.process_info import checked_trace_parent
from kinetod.rpc.diagnose_host import Diagnoser, HostDiagnoser
from kinetod.rpc.error_status import Context, streaming, unary
from kinetod.rpc.read_stacks import StackLooker
from kinetod.rpc.watch_counters import CounterWatcher
from kinetod.rpc.watch_host import HostWatcher
from kinetod.selection.process_registry import Registry, checked_selector
from kinetod.store.capture_store import Store, key_of
from kinetod.store.path_guard import folder_bytes

MAX_STREAMS = 256  # of stored files, for all callers: each holds one or two chunks of 1 MiB
Handler = Callable[["ProfilerService", pb.GetClockRequest, Context], Awaitable[pb.Clock]]
Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")

caller_trace_parent: contextvars.ContextVar[str] = contextvars.ContextVar("caller_trace_parent", default="")


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that their libraries report, or why they report nothing."""

    gpus: tuple[pb.Gpu, ...] = ()
    driver_version: str = ""
    note: str = ""


@dataclass(slots=True)
class HostInfo:
    """Answers GetHost. Blocks; call it in a thread."""

    settings: Settings
    store: Store
    hostname: str
    gpus: GpuReader
    plugins: KnownPlugins = field(default_factory=KnownPlugins)
    started_ns: int = field(default_factory=time.time_ns)

    def describe(self, *, agents: int, captures_running: int) -> pb.Host:
        """Describes the host's current state."""
        gpus, config = read_gpus(self.gpus), self.settings.current
        return pb.Host(
            hostname=self.hostname,
            version=__version__,
            started_ns=self.started_ns,
            now_ns=time.time_ns(),
            gpus=gpus.gpus,
            gpu_note=gpus.note,
            driver_version=gpus.driver_version,
            store_path=str(self.store.state_dir),
            store_free_bytes=self.store.free_bytes(),
            store_used_bytes=folder_bytes(self.store.captures_dir),
            agents=agents,
            captures_running=captures_running,
            agent_socket=str(config.agent_socket),
            max_duration_ns=config.max_duration_ns,
            default_buffer_limit_bytes=config.buffer_limit_bytes,
            plugins=map(_plugin, self.plugins.known),
        )


def _plugin(plugin: LoadedPlugin) -> pb.Plugin:
    return pb.Plugin(
        name=plugin.name,
        package=plugin.package,
        version=plugin.version,
        activity_types=plugin.activity_types,
        state=_state(plugin),
        reason=plugin.refused,
    )


def _state(plugin: LoadedPlugin) -> pb.PluginState:
    if not plugin.is_allowed:
        return pb.PLUGIN_STATE_OFF
    return pb.PLUGIN_STATE_REFUSED if plugin.refused else pb.PLUGIN_STATE_ON


def read_gpus(reader: GpuReader, deadline_s: float = DEADLINE_S) -> Gpus:
    """Reads the GPUs from their vendors' libraries. Blocks for at most `deadline_s`."""
    snapshot = reader.read(deadline_s=deadline_s)
    gpus = tuple(
        pb.Gpu(index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_total_bytes or 0)
        for gpu in snapshot.gpus
    )
    versions = [library.driver_version for library in snapshot.libraries if library.driver_version]
    absent = {library.name for library in snapshot.libraries if library.state is LibraryState.ABSENT}
    beside = {"sysman", "drm"} if "drm" in absent else set()  # nothing of AMD or Intel for them to read
    problems = [
        library.detail
        for library in snapshot.libraries
        if library.state is not LibraryState.OK and library.name not in beside & absent
    ]
    note = "" if gpus else "; ".join(dict.fromkeys(problems)) or "the driver found no GPU"
    return Gpus(gpus, ", ".join(versions), note)


def traced(
    handler: Callable[[Service, Request, Context], Awaitable[Response]],
) -> Callable[[Service, Request, Context], Awaitable[Response]]:
    """Lets the method read `caller_trace_parent`: the caller's span; "" for none or an invalid one."""

    @functools.wraps(handler)
    async def tracing(self: Service, request: Request, context: Context) -> Response:
        metadata = context.invocation_metadata() or ()
        text = next((value for name, value in metadata if name == TRACE_PARENT and isinstance(value, str)), "")
        token = caller_trace_parent.set(checked_trace_parent(text))
        try:
            return await handler(self, request, context)
        finally:
            caller_trace_parent.reset(token)

    return tracing


def stamped(handler: Handler) -> Handler:
    """Records in the answer when the request arrived and when the answer was made; it wraps everything else."""

    @functools.wraps(handler)
    async def stamping(self: "ProfilerService", request: pb.GetClockRequest, context: Context) -> pb.Clock:
        received_ns = time.time_ns()
        clock = await handler(self, request, context)
        clock.received_ns = received_ns
        clock.sent_ns = time.time_ns()
        return clock

    return stamping


class ProfilerService:
    """Implements profiler.proto. `unary` and `streaming` ask the gate before each method."""

    def __init__(
        self,
        *,
        hub: AgentHub,
        registry: Registry,
        captures: CaptureManager,
        host: HostInfo,
        watcher: HostWatcher,
        diagnoser: Diagnoser,
        host_diagnoser: HostDiagnoser,
        stacks: StackLooker,
        counters: CounterWatcher,
        gate: Authorizer,
        settings: Settings,
        looks: FairSlots,
    ) -> None:
        """looks: slots for inspecting processes and folders."""
        self.gate = gate
        self._hub = hub
        self._registry = registry
        self._captures = captures
        self._host = host
        self._watcher = watcher
        self._diagnoser = diagnoser
        self._host_diagnoser = host_diagnoser
        self._stacks = stacks
        self._counters = counters
        self._looks = looks
        self._streams = Shares(
            Reason.TOO_MANY_STREAMS,
            "downloads, file checks and stack reads",
            "access.max_streams_per_user",
            own=lambda: settings.current.max_streams_per_user,
            in_all=lambda: MAX_STREAMS,
        )

    def _stream(self, caller: Caller) -> AbstractContextManager[None]:
        return self._streams.one(caller.key, caller, admin=Role.ADMIN in caller.roles)

    @unary
    async def ListProcesses(self, request: pb.ListProcessesRequest, caller: Caller) -> pb.ListProcessesResponse:
        """Lists processes with an agent and those that could have one."""
        match = checked_selector(request.selector)
        async with self._looks.turn():
            everything = request.include_without_agent
            processes = await self._registry.processes(
                match, caller, include_without_agent=everything, trainers=request.trainers
            )
        return pb.ListProcessesResponse(processes=processes)

    @traced
    @unary
    async def CreateCapture(self, request: pb.CreateCaptureRequest, caller: Caller) -> pb.Capture:
        """Creates a capture."""
        span = caller_trace_parent.get()
        return await self._captures.create(request.spec, request.idempotency_key, caller, trace_parent=span)

    @unary
    async def StartCapture(self, request: pb.StartCaptureRequest, _caller: Caller) -> pb.Capture:
        """Starts an armed capture."""
        return await self._captures.start(request)

    @streaming
    async def WatchCapture(self, request: pb.WatchCaptureRequest, _caller: Caller) -> AsyncIterator[pb.CaptureEvent]:
        """Streams a snapshot, the changes, and a final snapshot."""
        async for event in self._captures.watch(request.id):
            yield event

    @unary
    async def GetCapture(self, request: pb.GetCaptureRequest, _caller: Caller) -> pb.Capture:
        """Returns one capture."""
        capture = await self._captures.observed(request.id)
        standing = {agent.key: agent.standing for agent in self._hub.standing()}
        for target in capture.targets:
            call = standing.get(key_of(target))
            if call is not None and call.capture_id == capture.id:
                target.standing.CopyFrom(call)
        return capture

    @unary
    async def ListCaptures(self, request: pb.ListCapturesRequest, caller: Caller) -> pb.ListCapturesResponse:
        """Returns one page of captures."""
        labels, size = dict(request.labels), request.page_size
        captures, token = await self._captures.page(labels, size, request.page_token, caller)
        return pb.ListCapturesResponse(captures=captures, next_page_token=token)

    @unary
    async def CancelCapture(self, request: pb.CancelCaptureRequest, _caller: Caller) -> pb.Capture:
        """Stops a capture."""
        return await self._captures.cancel(request.id, keep_partial=request.keep_partial)

    @unary
    async def DeleteCapture(self, request: pb.DeleteCaptureRequest, _caller: Caller) -> pb.DeleteCaptureResponse:
        """Removes a finished capture."""
        await self._captures.delete(request.id, keep_uploaded=request.keep_uploaded)
        return pb.DeleteCaptureResponse()

    @streaming
    async def FetchTrace(self, request: pb.FetchTraceRequest, caller: Caller) -> AsyncIterator[pb.TraceChunk]:
        """Streams the bytes of one file."""
        with self._stream(caller):
            async for chunk in self._captures.fetch(request):
                yield chunk

    @unary
    async def PinCapture(self, request: pb.PinCaptureRequest, caller: Caller) -> pb.Capture:
        """Pins a capture against retention, or unpins it."""
        return await self._captures.pin(request.id, caller, pinned=request.pinned)

    @streaming
    async def VerifyCapture(self, request: pb.VerifyCaptureRequest, caller: Caller) -> AsyncIterator[pb.FileCheck]:
        """Rereads and checks every stored file."""
        with self._stream(caller):
            async for check in self._captures.verify(request.id, uploaded=request.uploaded):
                yield check

    @stamped
    @unary
    async def GetClock(self, _request: pb.GetClockRequest, _caller: Caller) -> pb.Clock:
        """Returns this host's clock."""
        return pb.Clock()

    @unary
    async def GetHost(self, _request: pb.GetHostRequest, _caller: Caller) -> pb.Host:
        """Describes this host."""
        agents, running = len(self._hub), self._captures.running
        return await self._looks.in_thread(self._host.describe, agents=agents, captures_running=running)

    @streaming
    async def WatchHost(self, request: pb.WatchHostRequest, caller: Caller) -> AsyncIterator[pb.HostSample]:
        """Streams samples of this host, its GPUs and processes."""
        async for sample in self._watcher.watch(request, caller):
            yield sample

    @unary
    async def DiagnoseProcess(self, request: pb.DiagnoseProcessRequest, caller: Caller) -> pb.Diagnosis:
        """Reports whether and how an agent could be attached to a process."""
        async with self._looks.turn():
            return await self._diagnoser.diagnose(request.pid, caller)

    @streaming
    async def ReadStacks(self, request: pb.ReadStacksRequest, caller: Caller) -> AsyncIterator[pb.ProcessStacks]:
        """Streams where the threads of processes stand."""
        with self._stream(caller):
            async for stacks in self._stacks.read(request, caller):
                yield stacks

    @unary
    async def DiagnoseHost(self, _request: pb.DiagnoseHostRequest, caller: Caller) -> pb.HostDiagnosis:
        """Reports what on this host could prevent tracing."""
        async with self._looks.turn():
            return await self._host_diagnoser.diagnose(caller)

    @unary
    async def ListCounters(self, request: pb.ListCountersRequest, _caller: Caller) -> pb.ListCountersResponse:
        """Lists the GPUs whose hardware counters can be sampled."""
        async with self._looks.turn():
            return await self._counters.available(request)

    @streaming
    async def WatchCounters(self, request: pb.WatchCountersRequest, caller: Caller) -> AsyncIterator[pb.CounterMeans]:
        """Streams means of hardware counters."""
        async for means in self._counters.watch(request, caller):
            yield means
