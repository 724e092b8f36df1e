"""The services of the daemon that tracing a target needs."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kinetod.captures.counters.capture_counters import CounterSource
from kinetod.captures.result.decode_pool import WorkerPool
from kinetod.captures.target.buffer_memory import Promises
from kinetod.captures.target.device_graphs import DeviceGraphs
from kinetod.captures.target.exec_detection import Whose, nobody
from kinetod.captures.target.profiler_conflicts import Conflicts
from kinetod.config.settings import Config, Settings
from kinetod.plugins.plugin_loader import KnownPlugins


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Services shared by all targets of all captures."""

    settings: Settings
    workers: WorkerPool
    executor: Executor  # for draining and files
    free_bytes: Callable[[], int]
    host: str
    conflicts: Conflicts
    counters: CounterSource | None = None  # None: no hardware counters
    device_graphs: DeviceGraphs = field(default_factory=DeviceGraphs)
    whose: Whose = nobody  # what a process is now
    plugins: KnownPlugins = field(default_factory=KnownPlugins)
    promises: Promises = field(default_factory=Promises)  # of memory, to the targets that record now

    @property
    def config(self) -> Config:
        """The configuration in force now."""
        return self.settings.current
