"""Finds the framework that a Python process trains with, from its mapped libraries. Blocking.

A loaded library stays, so a result holds until the program ends; without a result, the next call reads the map again.
"""

import contextlib
from typing import Literal

from kinetod.processes.proc_folder import ProcessFolder

Framework = Literal["", "torch", "jax", "tensorflow", "cupy"]
# The first match counts: a program that uses torch may have loaded the others for its data.
LIBRARIES: dict[Framework, tuple[bytes, ...]] = {
    "torch": (b"/libtorch_cpu.so", b"/libtorch_python.so", b"/libtorch.so"),
    "jax": (b"/libjax_common.so", b"/xla_extension.so", b"/_jax."),
    "tensorflow": (b"/libtensorflow_framework.so", b"/libtensorflow_cc.so", b"/_pywrap_tensorflow_internal.so"),
    "cupy": (b"/cupy/_core/",),
}
_MAX_KNOWN = 4096
_known: dict[str, Framework] = {}  # program -> framework


def framework(folder: ProcessFolder, program: str) -> Framework:
    """A key of LIBRARIES; empty if the process has none of them or may not be inspected.

    program: as named by `credentials.program`; empty: unknown.
    """
    if program in _known:
        return _known[program]
    with contextlib.suppress(OSError):
        mapped = folder.read_once("maps")
        found: Framework = next(
            (name for name, files in LIBRARIES.items() if any(file in mapped for file in files)), ""
        )
        if found and program:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[program] = found
        return found
    return ""
