"""Which file of a process has device code that launches CUDA graphs.

Such a program, recorded by CUPTI, fails or hangs once it has made graphs for launch from the device (docs/harm.md).
Only the files reveal such code; whether there are such graphs only the driver knows.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from kinetod.attach.inspect.fatbin import launches_graphs
from kinetod.attach.inspect.process_inspection import PROC, mapped_paths

# CPU time, which a busy host takes nothing of: 70 files of a torch process take 2 ms when they are new, 0.7 ms
# afterwards. Who asks has a deadline for files that do not answer.
BUDGET_S = 0.2
# Of vendors and frameworks, which launch no graph from the device: libtorch_cuda alone has thousands of cubins.
_LEFT_OUT_FOLDERS = frozenset(
    ("torch", "nvidia", "jax", "jaxlib", "jax_plugins", "jax_cuda12_plugin", "jax_cuda13_plugin", "tensorflow")
)
# Whole names, so that a program's own libcustom_kernels.so is looked at.
_LEFT_OUT_NAMES = re.compile(
    r"lib(cuda|cudart|cudadebugger|cublas|cublasLt|cudnn\w*|cufft|cufftw|cufile\w*|cupti|curand|cusolver|cusolverMg"
    r"|cusparse|cusparseLt|cutensor\w*|nccl|npp\w+|nvinfer\w*|nvJitLink|nvjpeg|nvonnxparser|nvrtc|nvrtc-builtins"
    r"|nvToolsExt|nvidia-[\w-]+|c|m|python[\w.]*)(-[\d.]+)?\.so\b"
)
_MAX_KNOWN = 8192
_known: dict[tuple[int, int, int, int], bool] = {}  # by device, inode, size and time of change


def find(pid: int, proc: Path = PROC) -> str:
    """Its path as the process sees it; empty: none is seen. Files that cannot be read are left out."""
    end = time.thread_time() + BUDGET_S
    for path, place in _files(proc / str(pid)):
        if time.thread_time() > end:
            break
        try:
            if _launches(place):
                return path
        except OSError:
            continue
    return ""


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    """What the process maps, the program itself first: as it names it, and where we can open it."""
    try:
        program = os.readlink(folder / "exe")  # noqa: PTH115 - the text, with " (deleted)"
        paths = mapped_paths(folder)
    except OSError:
        return
    yield program.removesuffix(" (deleted)"), f"{folder}/exe"
    for path in paths:
        *folders, name = path.split("/")
        if ".so" in name and not _LEFT_OUT_NAMES.match(name) and _LEFT_OUT_FOLDERS.isdisjoint(folders):
            yield path, f"{folder}/root{path}"


def _launches(place: str) -> bool:
    """Whether one file has such code. Raises OSError."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if key not in _known:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[key] = launches_graphs(descriptor)
        return _known[key]
    finally:
        os.close(descriptor)
