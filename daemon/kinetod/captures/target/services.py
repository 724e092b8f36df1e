"""The daemon's services for tracing a target."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kineto_agent.protocol import wire
from kineto_agent.sources.interface import DEVICE_GRAPHS

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.base.fair_slots import FairSlots
from kinetod.base.safe_text import clean
from kinetod.captures.counters.capture_counters import CounterSource
from kinetod.captures.result.decode_pool import WorkerPool
from kinetod.captures.target.buffer_memory import Promises, wanted_sources
from kinetod.captures.target.endings import Whose, nobody
from kinetod.captures.target.profiler_conflicts import Conflicts
from kinetod.config.settings import Config, Settings
from kinetod.plugins.plugin_loader import KnownPlugins
from kinetod.processes.identity import ProcessKey

log = logging.getLogger(__name__)
_SOURCE = "cupti"
_MAX_PATH_CHARS = 400


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
