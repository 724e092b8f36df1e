"""The daemon's services for tracing a target.

`Conflicts` says what the daemon sees of conflicts that kept CUPTI from recording: other profilers, a GPU without
memory.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kineto_agent.protocol import wire
from kineto_agent.sources.interface import DEVICE_GRAPHS
from kineto_trace.base.quantities import format_size

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.base.fair_slots import FairSlots
from kinetod.base.safe_text import clean
from kinetod.captures.counters.capture_counters import CounterSource
from kinetod.captures.result.decode_pool import WorkerPool
from kinetod.captures.result.verdict import Ending
from kinetod.captures.target.buffer_memory import Promises, wanted_sources
from kinetod.captures.target.endings import Whose, nobody
from kinetod.config.settings import Config, Settings
from kinetod.gpus.gpu_types import Snapshot
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.check_runner import HostLooker
from kinetod.plugins.plugin_loader import KnownPlugins
from kinetod.processes.identity import ProcessKey
from kinetod.processes.profiler_signs import BY_PRODUCT, Holds
from kinetod.profilers import ProfilingTool, Scan, named

log = logging.getLogger(__name__)
_SOURCE = "cupti"
_MAX_PATH_CHARS = 400
CUPTI_BUSY = "CUPTI_BUSY"
CUPTI_NOT_INITIALIZED = "CUPTI_NOT_INITIALIZED"
DEADLINE_S = 15.0  # the verdict waits for it; 0.4 s are usual, and 5 were not enough beside a load of 14
ENOUGH_BYTES = 64 << 20  # four times what CUPTI was seen to need
NOT_THE_CAUSE = ", so memory is not the cause; if the program uses another profiler, trace again once that has ended"
PROC = Path("/proc")


class Conflicts:
    """Adds conflicts to the reason of an ending. store: the store's folder. gpus: returns the GPUs now; may block."""

    def __init__(
        self,
        store: Path,
        *,
        looker: HostLooker | None = None,
        proc: Path = PROC,
        gpus: Callable[[], Snapshot] = Snapshot,
    ) -> None:
        self._question = CheckQuestion(
            daemon_pid=os.getpid(), store=str(store), needed_bytes=0, helper=False, only_profilers=True
        )
        self._looker = looker or HostLooker(deadline_s=DEADLINE_S)
        self._proc = proc
        self._gpus = gpus

    async def explained(self, ending: Ending, uid: int, pid: int = 0) -> Ending:
        """Returns the ending with the conflicts added. uid: the target's user, who is shown only their own pids."""
        if ending.code == CUPTI_NOT_INITIALIZED:
            return replace(ending, reason=ending.reason + free_memory(await asyncio.to_thread(self._gpus), pid))
        if ending.code != CUPTI_BUSY:
            return ending
        looked = await self._looker.look(self._question)
        if looked.scan is None:
            return ending
        return replace(ending, reason=ending.reason + listed(looked.scan, lambda each: self._owner(each.pid) == uid))

    def _owner(self, pid: int) -> int | None:
        with contextlib.suppress(OSError):
            return (self._proc / str(pid)).stat().st_uid
        return None


def free_memory(found: Snapshot, pid: int) -> str:
    """Text to append to a reason: the free memory of the process's GPUs, and whether it is the cause; "" if it is
    unknown.
    """
    free = {
        gpu.index: max(gpu.memory_total_bytes - gpu.memory_used_bytes, 0)
        for gpu in found.gpus
        if gpu.memory_total_bytes is not None
        and gpu.memory_used_bytes is not None
        and pid in (process.pid for process in gpu.processes)
    }
    if not free:
        return ""
    text = "; " + ", ".join(f"GPU {index} has {format_size(left)} free" for index, left in free.items())
    return text if min(free.values()) < ENOUGH_BYTES else text + NOT_THE_CAUSE


def listed(found: Scan, visible: Callable[[ProfilingTool], bool]) -> str:
    """Text to append to a reason; "" if there are none. Profilers that hold only hardware counters cannot conflict."""
    tools: dict[str, list[ProfilingTool]] = {}
    for each in found.profilers:
        if BY_PRODUCT[each.product].holds is not Holds.COUNTERS:
            tools.setdefault(each.product, []).append(each)
    if not tools:
        return ""
    parts = [f"{product} ({named(profilers, visible)})" for product, profilers in tools.items()]
    return f"; other profilers on this host: {', '.join(parts)}"


class DeviceGraphs:
    """Finds agents that must be told about device graphs. look: returns a file with such code in a process, or ""; may
    raise OSError.
    """

    def __init__(self, look: Callable[[ProcessKey], Awaitable[str]] | None = None) -> None:
        self._look = look

    async def noted(self, request: wire.Start, agent: ConnectedAgent) -> wire.Start:
        """The request to send to the agent; unchanged, with a log line, if the process cannot be inspected."""
        if self._look is None or _SOURCE not in wanted_sources(request, agent.hello.sources):
            return request
        key = agent.identity.key
        try:
            file = await self._look(key)
        except OSError as exc:
            log.warning("cannot tell whether process %d launches CUDA graphs from device code: %s", key.pid, exc)
            return request
        if not file:
            return request
        return request._replace(options={**request.options, DEVICE_GRAPHS: clean(file, _MAX_PATH_CHARS)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Services shared by all targets of all captures."""

    settings: Settings
    workers: WorkerPool
    files: FairSlots  # turns at draining and files, by user
    free_bytes: Callable[[], int]
    host: str
    conflicts: Conflicts
    counters: CounterSource | None = None  # None: no hardware counters
    device_graphs: DeviceGraphs = field(default_factory=DeviceGraphs)
    whose: Whose = nobody  # returns a process's present credentials
    plugins: KnownPlugins = field(default_factory=KnownPlugins)
    promises: Promises = field(default_factory=Promises)  # of memory, to the targets that are recording

    @property
    def config(self) -> Config:
        """The configuration in force now."""
        return self.settings.current
