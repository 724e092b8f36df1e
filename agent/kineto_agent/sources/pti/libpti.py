"""Chooses the libpti_view to use: the copy that the process has loaded, since SYCL knows only one."""

import os
from typing import List, Mapping, Optional

from kineto_agent.system import env
from kineto_agent.system.mappings import mapped_files

_LOADER, _SYCL, _FRONT, _CORE, _TORCH = (
    "libze_loader.so",
    "libsycl.so",
    "libpti_view.so",
    "libpti.so",
    "libtorch_cpu.so",
)

_FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC
_FLAGS_FIELD = 6  # of /proc/self/stat, counted from the field after the name


def find(environ: Mapping[str, str] = os.environ, maps: str = "/proc/self/maps") -> Optional[str]:
    """Path of the libpti_view to use; None if Level Zero is not in the process, or without such a library."""
    if not mapped_files(_LOADER, maps):
        return None
    if env.is_elevated():
        environ = {}
    explicit = environ.get(env.PTI_LIBRARY)
    if explicit:
        return explicit
    loaded = mapped_files(_FRONT, maps)
    if loaded:
        return loaded[0]
    for sycl in mapped_files(_SYCL, maps):
        beside = _beside(os.path.dirname(sycl))
        if beside:
            return beside[-1]
    return None


def _beside(folder: str) -> List[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    # libpti_view.so.1: the name that programs are linked with. Ordered by its number.
    numbered = [name for name in names if name.startswith(_FRONT + ".") and name[len(_FRONT) + 1 :].isdigit()]
    return [os.path.join(folder, name) for name in sorted(numbered, key=lambda name: int(name.rpartition(".")[2]))]


def has_core(maps: str = "/proc/self/maps") -> bool:
    """Whether PTI's core library is in the process, so that somebody has called PTI."""
    return bool(mapped_files(_CORE, maps))


def has_torch(maps: str = "/proc/self/maps") -> bool:
    """Whether torch is in the process."""
    return bool(mapped_files(_TORCH, maps))


def sees_sycl(maps: str = "/proc/self/maps") -> bool:
    """Whether libpti_view was loaded before libsycl, as far as that can be determined: torch links with both."""
    return all(mapped_files(stem, maps) for stem in (_TORCH, _FRONT, _SYCL))


def is_forked(stat: str = "/proc/self/stat") -> bool:
    """Whether this process was forked and has not executed another program since."""
    try:
        with open(stat, "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return bool(int(fields[_FLAGS_FIELD]) & _FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return True
