"""Chooses the libcupti to use: the copy that the process has loaded, since two copies in one process collide."""

import glob
import os
import sys
from typing import List, Mapping, Optional, Sequence, Tuple

from kineto_agent.system import env, mappings
from kineto_agent.system.mappings import mapped_files

# Below an entry of sys.path: where NVIDIA's wheels put the library. Newest first.
_WHEEL_PATTERNS = ("nvidia/cu[0-9]*/lib/libcupti.so.*", "nvidia/cuda_cupti/lib/libcupti.so.*")
# Below a CUDA toolkit.
_TOOLKIT_PATTERNS = ("extras/CUPTI/lib64/libcupti.so.*", "targets/*/lib/libcupti.so.*", "lib64/libcupti.so.*")
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_TOOLKIT_DEFAULT = "/usr/local/cuda"
_KINETO = "libtorch_cpu.so"  # keeps CUPTI's subscriber permanently once it has been used
# Libraries that keep it for the duration of a session.
_XLA = "xla_cuda_plugin"
_OTHERS = (_XLA, "xla_extension", "libjax_common", "libtensorflow", "libonnxruntime_providers_cuda")


def installed(path: Sequence[str], environ: Mapping[str, str], root: str = "") -> Optional[str]:
    """The newest libcupti of NVIDIA's wheels in the folders of `path`, otherwise that of a CUDA toolkit.

    root: a process's root folder, in which to look; the result is the path as that process sees it.
    """
    folders: List[Tuple[str, Tuple[str, ...]]] = [(folder, _WHEEL_PATTERNS) for folder in path if folder]
    toolkits = [environ[name] for name in _TOOLKIT_VARIABLES if environ.get(name)] + [_TOOLKIT_DEFAULT]
    folders += [(folder, _TOOLKIT_PATTERNS) for folder in toolkits]
    for folder, patterns in folders:
        for pattern in patterns:
            hits = glob.glob(os.path.join(glob.escape(root + folder), pattern))
            if hits:
                return sorted(hits)[-1][len(root) :]
    return None


def find(
    environ: Mapping[str, str] = os.environ, maps: str = "/proc/self/maps", path: Optional[Sequence[str]] = None
) -> Optional[str]:
    """Path of the libcupti to use, or None if there is nothing to trace. path: replaces sys.path."""
    if env.is_elevated():
        environ = {}
    explicit = environ.get(env.CUPTI_LIBRARY)
    if explicit:
        return explicit
    loaded = mapped_files("libcupti.so", maps)
    if loaded:
        return loaded[0]
    if mapped_files("libcuda.so", maps):
        return installed(sys.path if path is None else path, environ)
    return None


def library_at(address: int, maps: str = "/proc/self/maps") -> str:
    """Name of the library file whose code contains this address; "the program itself" if it has no file."""
    try:
        lines = mappings.read(maps).split(b"\n")[:-1]  # a path may contain \r
    except OSError:
        return "unknown"
    for line in lines:
        fields = line.split(None, 5)
        begin, end = fields[0].split(b"-")
        if int(begin, 16) <= address < int(end, 16):
            name = os.path.basename(os.fsdecode(fields[5])) if len(fields) > 5 else ""
            return "Python's ctypes" if name.startswith(("libffi", "_ctypes")) else name or "the program itself"
    return "the program itself"


def unsubscribed_listener(address: int, library: str, maps: str = "/proc/self/maps") -> str:
    """The library of this buffer callback, if it may be in use although CUPTI has no subscriber; otherwise ""."""
    name = library_at(address, maps)
    idle = (
        "libtorch",
        "libkineto_collector",
        "memfd:",
        os.path.basename(library),
        *_OTHERS,
    )  # their sessions are detected otherwise, or are ours
    return "" if name.startswith(idle) else name


def session_users(maps: str = "/proc/self/maps") -> List[str]:
    """File names of the mapped libraries that use CUPTI's subscriber only while they profile."""
    return _mapped_names(_OTHERS, maps)


def changes_graphs(maps: str = "/proc/self/maps") -> List[str]:
    """File names of the mapped libraries that change CUDA graphs while they run: XLA's command buffers."""
    return _mapped_names([_XLA], maps)


def _mapped_names(stems: Sequence[str], maps: str) -> List[str]:
    return sorted({os.path.basename(path) for stem in stems for path in mapped_files(stem, maps)})


def only_kineto(maps: str = "/proc/self/maps") -> bool:
    """Whether the holder of CUPTI's subscriber is torch's profiler, which keeps it although it is idle."""
    return bool(mapped_files(_KINETO, maps)) and not session_users(maps)
