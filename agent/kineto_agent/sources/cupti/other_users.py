"""Who else in a process uses CUPTI, as far as its mapped files tell."""

import os
from typing import List

from kineto_agent.system import mappings
from kineto_agent.system.mappings import mapped_files

_KINETO = "libtorch_cpu.so"  # keeps CUPTI's subscriber for good once it has been used
# Libraries that keep it for the length of a session.
_OTHERS = ("xla_cuda_plugin", "xla_extension", "libjax_common", "libtensorflow", "libonnxruntime_providers_cuda")


def name_of(address: int, maps: str = "/proc/self/maps") -> str:
    """File name of the library that has this address in its code; "the program itself" if that has no file."""
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


def may_listen(address: int, library: str, maps: str = "/proc/self/maps") -> str:
    """The library of this buffer callback, if it may be in use although CUPTI has no subscriber; else ""."""
    name = name_of(address, maps)
    idle = (
        "libtorch",
        "libkineto_collector",
        "memfd:",
        os.path.basename(library),
        *_OTHERS,
    )  # their sessions are known otherwise, or ours
    return "" if name.startswith(idle) else name


def sessions(maps: str = "/proc/self/maps") -> List[str]:
    """File names of the mapped libraries that use CUPTI's subscriber only while they profile."""
    return sorted({os.path.basename(path) for stem in _OTHERS for path in mapped_files(stem, maps)})


def only_kineto(maps: str = "/proc/self/maps") -> bool:
    """Whether the holder of CUPTI's subscriber is torch's profiler, which keeps it although it is idle."""
    return bool(mapped_files(_KINETO, maps)) and not sessions(maps)
