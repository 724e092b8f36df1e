"""WatchHost: the host, its GPUs and its processes, sampled periodically for `kinetoctl top`.

Every watcher has samples of its own, because rates cover the time between two of them; those of the GPUs are shared.
Blocking work happens in threads, and reading the GPUs has a deadline: if a driver hangs, a sample leaves them out.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.agents.agent_hub import AgentHub
from kinetod.base.errors import Reason, invalid
from kinetod.base.fair_slots import FairSlots
from kinetod.config.settings import Settings
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import SHARES, GpuState, Snapshot, between
from kinetod.permissions.caller_limits import Shares
from kinetod.permissions.role_policy import Caller, Role
from kinetod.processes.identity import ProcessKey
from kinetod.selection.process_registry import Match, Registry, checked_selector
from kinetod.telemetry.host_sample import HostReading, cpu_shares, sample_host, space_of

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
            "host watches",
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
        sample.gpus.extend(gpu_samples(before.gpus, now.gpus))
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


def gpu_samples(before: Snapshot, now: Snapshot) -> list[pb.GpuSample]:
    """The GPUs as they are, in the order of `now`, with rates since `before`."""
    seconds = (now.monotonic_ns - before.monotonic_ns) / 1e9
    earlier = {gpu.uuid: gpu for gpu in before.gpus} if seconds > 0 else {}
    return [_gpu(gpu, earlier.get(gpu.uuid), seconds) for gpu in now.gpus]


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
