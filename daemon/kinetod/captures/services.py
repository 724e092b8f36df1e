"""What the work on one target needs from the daemon."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kinetod.captures.conflicts import Conflicts
from kinetod.captures.device_graphs import DeviceGraphs
from kinetod.captures.replacing import Whose, nobody
from kinetod.captures.room import Promises
from kinetod.config import Config, Settings
from kinetod.workers import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Shared by all targets of all captures."""

    settings: Settings
    workers: WorkerPool
    executor: Executor  # for draining and files
    free_bytes: Callable[[], int]
    host: str
    conflicts: Conflicts
    device_graphs: DeviceGraphs = field(default_factory=DeviceGraphs)
    whose: Whose = nobody  # what a process is now
    promises: Promises = field(default_factory=Promises)  # of memory, to the targets that record now

    @property
    def config(self) -> Config:
        """The configuration in force now."""
        return self.settings.current
