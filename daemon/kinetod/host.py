"""This host: GPUs, disk, limits."""

import contextlib
import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.config import Settings
from kinetod.store import Store, folder_bytes
from kinetod.text import clean


@dataclass(frozen=True, slots=True)
class Gpus:
    """What NVML says, or why it says nothing."""

    gpus: tuple[pb.Gpu, ...] = ()
    driver_version: str = ""
    note: str = ""


@dataclass(slots=True)
class HostInfo:
    """Answers GetHost. Blocking; call it in a thread."""

    settings: Settings
    store: Store
    hostname: str
    started_ns: int = field(default_factory=time.time_ns)

    def describe(self, *, agents: int, captures_running: int) -> pb.Host:
        """Everything, fresh."""
        gpus, config = read_gpus(), self.settings.current
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
        )


def _load_nvml() -> ModuleType | None:
    with contextlib.suppress(ImportError):
        import pynvml

        return pynvml  # type: ignore[no-any-return]  # untyped, and optional
    return None


def read_gpus(nvml: Any = None) -> Gpus:
    """The GPUs by NVML; `nvml` is the module pynvml (default: the installed one)."""
    nvml = nvml or _load_nvml()
    if nvml is None:
        return Gpus(note="nvidia-ml-py is not installed (pip install 'kinetod[nvidia]')")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        return Gpus(note=f"NVML: {clean(str(exc), 200)}")
    try:
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        note = "" if gpus else "the driver finds no GPU"
        return Gpus(gpus, _text(nvml.nvmlSystemGetDriverVersion()), note)
    except nvml.NVMLError as exc:
        return Gpus(note=f"NVML: {clean(str(exc), 200)}")
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> pb.Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return pb.Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _text(value: str | bytes) -> str:
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else value, 128)
