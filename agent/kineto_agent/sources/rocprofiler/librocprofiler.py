"""Which librocprofiler-sdk to use: the copy that the process has loaded, since two copies in one process collide."""

import os
from typing import Mapping, Optional

from kineto_agent.system import env
from kineto_agent.system.mappings import mapped_files

_SDK, _HIP = "librocprofiler-sdk.so", "libamdhip64.so"
_NAMES = ("librocprofiler-sdk.so.1", _SDK)  # of an installation; of torch's wheels
_DEVICE = "/dev/kfd"


def may_be_here(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an AMD GPU could be used in this process. Cheap: the process is not looked at."""
    return bool(environ.get(env.ROCPROFILER_LIBRARY)) or os.path.exists(_DEVICE)


def find(environ: Mapping[str, str] = os.environ, maps: str = "/proc/self/maps") -> Optional[str]:
    """Path of the library to use; None where HIP is not in the process, or there is no such library."""
    loaded = mapped_files(_SDK, maps)
    if loaded:
        return loaded[0]
    hip = mapped_files(_HIP, maps)
    if not hip:
        return None
    explicit = "" if env.is_elevated() else environ.get(env.ROCPROFILER_LIBRARY, "")
    if explicit:
        return explicit
    for folder in (os.path.dirname(path) for path in hip):
        for name in _NAMES:
            beside = os.path.join(folder, name)
            if os.path.exists(beside):
                return beside
    return None
