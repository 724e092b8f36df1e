"""Which libcupti kinetod-counters loads: one that is named, the wheel's, the host's, or one that a process has.

What is loaded here runs with the rights of kinetod-counters. So a path comes from its own command line or from folders
that only root and its user can change, never from a request; a library of another user's process is left alone.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from kineto_agent.system.mappings import mapped_files

from kinetod.plugins.file_trust import problem_of, trusted_uids

_FILES = "libcupti.so.[0-9]*"
# Of the wheels nvidia-cuda-cupti and nvidia-cuda-cupti-cu12, below the package `nvidia`.
_WHEEL_FOLDERS = ("cu[0-9]*/lib", "cuda_cupti/lib")
_HOST_FOLDERS = (
    "usr/local/cuda/extras/CUPTI/lib64",
    "usr/local/cuda/targets/*/lib",
    "usr/local/cuda-*/extras/CUPTI/lib64",
    "usr/local/cuda-*/targets/*/lib",
    "opt/cuda/extras/CUPTI/lib64",
    "usr/lib/*-linux-gnu",
    "usr/lib64",
)


def find_libraries(root: Path = Path("/"), pids: tuple[int, ...] = (), proc: Path = Path("/proc")) -> list[str]:
    """Paths to try, the best first: the wheel's, the host's (of each folder the newest first), those of processes."""
    found = [*_of_wheel(), *_of_host(root)]
    for pid in pids:
        found += [path for path in mapped_files("libcupti.so", str(proc / str(pid) / "maps")) if is_trusted(path)]
    return list(dict.fromkeys(found))


def is_trusted(path: str) -> bool:
    """Whether nobody but root and our user could have made it, or what lies beside it."""
    return Path(path).is_absolute() and not problem_of([Path(path).resolve().parent], trusted_uids())


def _of_wheel() -> Iterator[str]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for pattern in _WHEEL_FOLDERS:
            yield from _in_order(Path(folder), pattern)


def _of_host(root: Path) -> Iterator[str]:
    for folder in _HOST_FOLDERS:
        yield from _in_order(root, folder)


def _in_order(root: Path, folders: str) -> list[str]:
    return sorted((str(path) for path in root.glob(f"{folders}/{_FILES}")), reverse=True)
