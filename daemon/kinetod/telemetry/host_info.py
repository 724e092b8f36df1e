"""This host: GPUs, disk, limits."""

import time
from dataclasses import dataclass, field

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.config.settings import Settings
from kinetod.gpus.gpu_reader import DEADLINE_S, GpuReader
from kinetod.gpus.gpu_types import LibraryState
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin
from kinetod.store.capture_store import Store
from kinetod.store.path_guard import folder_bytes


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
