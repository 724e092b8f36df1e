"""The Profiler service: each method translates one call to the daemon's parts.

For `kinetoctl top` the host, its GPUs and its processes are sampled periodically. Every watcher has samples of its own,
because rates cover the time between two of them; those of the GPUs are shared. Blocking work happens in threads, and
reading the GPUs has a deadline: if a driver hangs, a sample leaves them out.
"""

import asyncio
import contextlib
import contextvars
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.telemetry_ids import TRACE_PARENT

from kinetod import __version__
from kinetod.access.call_gate import Authorizer
from kinetod.agents.agent_hub import AgentHub
from kinetod.base.errors import Reason, invalid
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.manager import CaptureManager
from kinetod.config.settings import Settings
from kinetod.gpus.gpu_reader import DEADLINE_S, GpuReader
from kinetod.gpus.gpu_types import SHARES, GpuState, LibraryState, Snapshot, between
from kinetod.permissions.caller_limits import Shares
from kinetod.permissions.role_policy import Caller, Role
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin
from kinetod.processes.identity import ProcessKey
from kinetod.processes.process_info import checked_trace_parent
from kinetod.rpc.diagnose_host import Diagnoser, HostDiagnoser
from kinetod.rpc.error_status import Context, streaming, unary
from kinetod.rpc.read_stacks import StackLooker
from kinetod.rpc.watch_counters import CounterWatcher
from kinetod.selection.process_registry import Match, Registry, checked_selector
from kinetod.store.capture_store import Store, key_of
from kinetod.store.path_guard import folder_bytes
from kinetod.telemetry.host_sample import HostReading, cpu_shares, sample_host, space_of

MAX_STREAMS = 256  # of stored files, for all callers: each holds one or two chunks of 1 MiB
Handler = Callable[["ProfilerService", pb.GetClockRequest, Context], Awaitable[pb.Clock]]
Service = TypeVar("Service")
Request = TypeVar("Request")
Response = TypeVar("Response")

caller_trace_parent: contextvars.ContextVar[str] = contextvars.ContextVar("caller_trace_parent", default="")
DEFAULT_INTERVAL_NS = 2 * 10**9
LEAST_INTERVAL_NS = 500 * 10**6
MOST_INTERVAL_NS = 3600 * 10**9
FIRST_S = 0.5  # interval for the rates of the first sample
GPUS_AGE_S = 0.25  # simultaneous watchers share a reading
MAX_WATCHERS = 32  # for all callers
MAX_PROCESSES = 2000  # gRPC clients accept 4 MiB by default
MAX_COMMAND_CHARS = 1000

_GPU_FIELDS = (
    "utilization", "memory_utilization", "memory_used_bytes", "power_watts", "power_limit_watts",
    "temperature_celsius", "sm_clock_hertz", "memory_clock_hertz", "pcie_transmit_bytes_per_second",
    "pcie_receive_bytes_per_second", "ecc_uncorrected",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Usage:
    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """All counters at one moment."""

    host: HostReading
    gpus: Snapshot
    usage: Mapping[ProcessKey, _Usage]

    def seconds_since(self, before: "_Moment") -> float:
        return max(1e-6, (self.host.time_ns - before.host.time_ns) / 1e9)


class HostWatcher:
    """Answers WatchHost."""

    def __init__(
        self,
        *,
        hub: AgentHub,
        registry: Registry,
        gpus: GpuReader,
        captures_running: Callable[[], int],
        state_dir: Path,
        hostname: str,
        settings: Settings,
        looks: FairSlots,
    ) -> None:
        """looks: slots for inspecting processes."""
        self._hub = hub
        self._registry = registry
        self._gpus = gpus
        self._captures_running = captures_running
        self._state_dir = state_dir
        self._hostname = hostname
        self._looks = looks
        self._watches = Shares(
            Reason.TOO_MANY_WATCHERS,
            "watches of this host",
            "access.max_watches_per_user",
            own=lambda: settings.current.max_watches_per_user,
            in_all=lambda: MAX_WATCHERS,
        )

    async def watch(self, request: pb.WatchHostRequest, caller: Caller) -> AsyncIterator[pb.HostSample]:
        """Yields endless samples with the processes that the caller may see. Raises InvalidRequest, Exhausted."""
        match = checked_selector(request.selector)
        interval_s = _interval_ns(request.interval_ns) / 1e9
        with self._watches.one(caller.key, caller, admin=Role.ADMIN in caller.roles):
            before, _ = await self._look(match, caller, request.include_without_agent)
            wait_s = min(interval_s, FIRST_S)
            while True:
                await asyncio.sleep(wait_s)
                wait_s = interval_s
                now, processes = await self._look(match, caller, request.include_without_agent)
                yield await self._sample(before, now, processes)
                before = now

    async def _look(self, match: Match, caller: Caller, everything: bool) -> tuple[_Moment, list[pb.Process]]:
        async with self._looks.turn():
            return await self._look_now(match, caller, everything)

    async def _look_now(self, match: Match, caller: Caller, everything: bool) -> tuple[_Moment, list[pb.Process]]:
        gpus = await asyncio.to_thread(lambda: self._gpus.read(max_age_s=GPUS_AGE_S))
        processes = await self._processes(match, caller, gpus, everything)
        keys = [ProcessKey(process.pid, process.start_time_ns) for process in processes]
        host, usage = await asyncio.to_thread(lambda: (sample_host(), _usage(keys)))
        return _Moment(host=host, gpus=gpus, usage=usage), processes

    async def _processes(self, match: Match, caller: Caller, gpus: Snapshot, everything: bool) -> list[pb.Process]:
        on_gpus = {process.pid for gpu in gpus.gpus for process in gpu.processes}
        found = await self._registry.shown(match, caller, on_gpus, everything=everything)
        return found[:MAX_PROCESSES]

    async def _sample(self, before: _Moment, now: _Moment, processes: list[pb.Process]) -> pb.HostSample:
        seconds = now.seconds_since(before)
        busy, iowait = cpu_shares(before.host, now.host)
        host = now.host
        sample = pb.HostSample(
            time_ns=host.time_ns,
            hostname=self._hostname,
            version=__version__,
            cpus=host.cpus,
            cpu_busy=busy,
            cpu_iowait=iowait,
            load_1m=host.load[0],
            memory_total_bytes=host.memory_total_bytes,
            memory_available_bytes=host.memory_available_bytes,
            swap_total_bytes=host.swap_total_bytes,
            swap_used_bytes=host.swap_used_bytes,
            agents=len(self._hub),
            captures_running=self._captures_running(),
            disk_read_bytes_per_second=_grown(before.host.disks, host.disks, "read_bytes") / seconds,
            disk_written_bytes_per_second=_grown(before.host.disks, host.disks, "written_bytes") / seconds,
            network_receive_bytes_per_second=_grown(before.host.interfaces, host.interfaces, "received_bytes")
            / seconds,
            network_transmit_bytes_per_second=_grown(before.host.interfaces, host.interfaces, "sent_bytes") / seconds,
        )
        with contextlib.suppress(OSError):
            sample.store_free_bytes = (await asyncio.to_thread(space_of, self._state_dir)).free_bytes
        gpu_seconds = (now.gpus.monotonic_ns - before.gpus.monotonic_ns) / 1e9
        earlier = {gpu.uuid: gpu for gpu in before.gpus.gpus} if gpu_seconds > 0 else {}
        sample.gpus.extend(_gpu(gpu, earlier.get(gpu.uuid), gpu_seconds) for gpu in now.gpus.gpus)
        for library in now.gpus.libraries:
            sample.gpu_libraries.add(name=library.name, state=library.state.value, detail=library.detail)
        sample.processes.extend(_process(process, before, now, seconds) for process in processes)
        return sample


def _interval_ns(asked: int) -> int:
    if not asked:
        return DEFAULT_INTERVAL_NS
    if not LEAST_INTERVAL_NS <= asked <= MOST_INTERVAL_NS:
        raise invalid("interval_ns", f"must be between {LEAST_INTERVAL_NS} and {MOST_INTERVAL_NS}, got {asked}")
    return asked


def _grown(before: Mapping[str, object], now: Mapping[str, object], name: str) -> int:
    """How much a counter has grown in total, over the devices present in both samples."""
    return sum(
        max(0, int(getattr(now[device], name)) - int(getattr(before[device], name)))
        for device in now.keys() & before.keys()
    )


def _usage(keys: Iterable[ProcessKey]) -> dict[ProcessKey, _Usage]:
    usage = {}
    for key in keys:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(key.pid)
            times = process.cpu_times()
            usage[key] = _Usage(times.user + times.system, process.memory_info().rss)
    return usage


def _gpu(gpu: GpuState, before: GpuState | None, seconds: float) -> pb.GpuSample:
    known = pb.Gpu(index=gpu.index, uuid=gpu.uuid, name=gpu.name, memory_bytes=gpu.memory_total_bytes or 0)
    sample = pb.GpuSample(gpu=known, vendor=gpu.vendor, pci_bus_id=gpu.pci_bus_id, device=gpu.device, works=gpu.works)
    for name in _GPU_FIELDS:
        if (value := getattr(gpu, name)) is not None:
            setattr(sample, name, value)
    for direction in ("transmit", "receive"):
        now, then = (getattr(each, f"nvlink_{direction}_bytes", None) for each in (gpu, before))
        if now is not None and then is not None:
            setattr(sample, f"nvlink_{direction}_bytes_per_second", max(0, now - then) / seconds)
    active = between(before.activity if before is not None else None, gpu.activity)
    for name in active.keys() & set(SHARES):
        setattr(sample, name, active[name])
    for name in active.keys() - set(SHARES):
        setattr(sample, f"{name}_bytes_per_second", active[name])
    for xid, count in gpu.xid_errors.items():
        sample.xid_errors[xid] = count
    return sample


def _process(process: pb.Process, before: _Moment, now: _Moment, seconds: float) -> pb.ProcessSample:
    key = ProcessKey(process.pid, process.start_time_ns)
    sample = pb.ProcessSample(process=process)
    if len(command := " ".join(process.command)) > MAX_COMMAND_CHARS:
        sample.process.command[:] = [command[:MAX_COMMAND_CHARS]]
    usage, earlier = now.usage.get(key), before.usage.get(key)
    if usage is not None:
        sample.memory_bytes = usage.memory_bytes
        if earlier is not None:
            sample.cpu = max(0.0, usage.cpu_seconds - earlier.cpu_seconds) / seconds
    for gpu in now.gpus.gpus:
        for each in gpu.processes:
            if each.pid == process.pid:
                use = sample.gpus.add(gpu=gpu.index, vendor=gpu.vendor)
                if each.memory_bytes is not None:
                    use.memory_bytes = each.memory_bytes
                if each.utilization is not None:
                    use.utilization = each.utilization
    return sample


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
    note = "" if gpus else "; ".join(dict.fromkeys(problems)) or "the driver finds no GPU"
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
            "fetches and checks of stored files, and reads of stacks",
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
