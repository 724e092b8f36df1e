"""Which libcupti a process without Python should load: paths as that process sees them.

A compiled program has rarely loaded one. Its file system is read through /proc/PID/root, where links to absolute
paths lead elsewhere; so the folders that such links usually name are searched as well.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from kineto_agent.system import env
from kineto_agent.system.mappings import mapped_files

_PROC = Path("/proc")
_FILES = "libcupti.so.[0-9]*"
# Below a CUDA toolkit.
_TOOLKIT_FOLDERS = ("extras/CUPTI/lib64", "targets/*/lib", "lib64")
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_TOOLKITS = ("usr/local/cuda", "usr/local/cuda-*", "opt/cuda")
_SYSTEM_FOLDERS = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib")
# Where one of these lies, its toolkit or its wheel is near.
_NEIGHBOURS = ("libcudart.so", "libcublas.so", "libcudnn.so", "libnvrtc.so")
_NEAR = (".", "../extras/CUPTI/lib64", "../../cuda_cupti/lib")


def find_cupti(pid: int, environ: Mapping[str, str], proc: Path = _PROC) -> str | None:
    """Path of the libcupti to use; None where there is nothing to trace, or no libcupti."""
    explicit = environ.get(env.CUPTI_LIBRARY)
    if explicit:
        return explicit
    maps = str(proc / str(pid) / "maps")
    loaded = mapped_files("libcupti.so", maps)
    if loaded:
        return loaded[0]
    if not mapped_files("libcuda.so", maps):
        return None
    root = proc / str(pid) / "root"
    for folder in _folders(maps, environ):
        hits = sorted(root.glob(f"{folder}/{_FILES}"))
        if hits:
            return "/" + str(hits[-1].relative_to(root))
    return None


def _folders(maps: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Patterns below the root, the likeliest first."""
    for stem in _NEIGHBOURS:
        for path in mapped_files(stem, maps):
            yield from (_below_root(os.path.normpath(PurePosixPath(path).parent / near)) for near in _NEAR)
    named = [_below_root(environ[name]) for name in _TOOLKIT_VARIABLES if environ.get(name, "").startswith("/")]
    for toolkit in (*filter(None, named), *_TOOLKITS):
        yield from (f"{toolkit}/{folder}" for folder in _TOOLKIT_FOLDERS)
    for entry in environ.get("LD_LIBRARY_PATH", "").split(":"):
        if entry.startswith("/") and _below_root(entry):
            yield _below_root(entry)
    yield from _SYSTEM_FOLDERS


def _below_root(path: str) -> str:
    """A folder that the process names, which is no pattern: one like **/** would be looked for everywhere."""
    return glob.escape(os.path.normpath(path).lstrip("/"))
