"""Which libcupti to use: the copy that the process has loaded, since two copies in one process collide."""

import glob
import os
import sys
from typing import List, Mapping, Optional, Sequence, Tuple

from kineto_agent.system import env
from kineto_agent.system.mappings import mapped_files

# Below an entry of sys.path: where NVIDIA's wheels put the library. Newest first.
_WHEEL_PATTERNS = ("nvidia/cu[0-9]*/lib/libcupti.so.*", "nvidia/cuda_cupti/lib/libcupti.so.*")
# Below a CUDA toolkit.
_TOOLKIT_PATTERNS = ("extras/CUPTI/lib64/libcupti.so.*", "targets/*/lib/libcupti.so.*", "lib64/libcupti.so.*")
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_TOOLKIT_DEFAULT = "/usr/local/cuda"


def installed(path: Sequence[str], environ: Mapping[str, str], root: str = "") -> Optional[str]:
    """The newest libcupti of NVIDIA's wheels in the folders of `path`, else that of a CUDA toolkit.

    root: a process's root folder, below which to look; the result is the path as that process names it.
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
    """Path of the libcupti to use, or None where there is nothing to trace. path: stands for sys.path."""
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
