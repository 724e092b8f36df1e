"""Determines whether the Kineto in this process's torch is warming up or recording, no matter who requested it.

Theory of operation
    libtorch_cpu exports libkineto::api() and ActivityProfilerProxy::isActive(); the profiler is the second word of
    what api() returns. isActive() answers from any thread and knows torch.profiler's sessions (from their warm-up on)
    as well as those requested through a file or dynolog. It follows a pointer that is null until Kineto has been
    initialised, so the object is checked first, through /proc/self/mem (a wrong address is an error there, not a
    crash): it must be the known class, and initialised.
"""

import os
import struct
import sys
from typing import Any, List, Optional

from kineto_agent.system.debuglog import log, log_exception

_API = "_ZN9libkineto3apiEv"
_IS_ACTIVE = "_ZN9libkineto21ActivityProfilerProxy8isActiveEv"
_VTABLE = "_ZTVN9libkineto21ActivityProfilerProxyE"
_WORD = struct.Struct("=Q")
PROFILER = 8  # in libkineto::LibkinetoApi: after the reference to the ConfigLoader
_CONTROLLER = 24  # in ActivityProfilerProxy: after the virtual table, cpuOnly_ and the ConfigLoader
_FIRST_METHOD = 16  # in a virtual table
LIBRARY = "libtorch_cpu.so"


class _Functions:
    """Kineto's functions in the loaded libtorch_cpu. Raises OSError and AttributeError."""

    def __init__(self, path: str) -> None:
        import ctypes  # some programs do not use it

        from kineto_agent.system.libraries import Library

        library = Library(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        self._api = getattr(library, _API)
        self._api.restype = ctypes.c_void_p
        self._is_active = getattr(library, _IS_ACTIVE)
        self._is_active.restype = ctypes.c_bool
        self._is_active.argtypes = (ctypes.c_void_p,)
        self._vtable = library.address(_VTABLE)

    def active(self) -> bool:
        """Whether Kineto warms up or records. Raises OSError."""
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            profiler = word(memory, self._api() + PROFILER)
            if not profiler:
                return False
            if word(memory, profiler) != self._vtable + _FIRST_METHOD:
                raise OSError("Kineto's profiler has an unknown class")
            if not word(memory, profiler + _CONTROLLER):
                return False
        finally:
            os.close(memory)
        return bool(self._is_active(profiler))


def word(memory: int, address: int) -> int:
    """The word at this address. memory: /proc/self/mem, open. Raises OSError."""
    data = os.pread(memory, _WORD.size, address)
    if len(data) != _WORD.size:
        raise OSError("address %#x cannot be read" % address)
    return int(_WORD.unpack(data)[0])


_functions: List[Optional[_Functions]] = []  # cached once torch is loaded


def active() -> Optional[bool]:
    """Whether Kineto is active; False without torch, None if that cannot be determined. Never raises."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "_C"):  # missing or being imported: its library may not be loaded yet
        return False
    try:
        if not _functions:
            _functions.append(_find(torch))
        found = _functions[0]
        return found.active() if found is not None else None
    except Exception:  # noqa: BLE001 - no answer is an answer
        log_exception("cannot query whether Kineto is active")
        return None


def _find(torch: Any) -> Optional[_Functions]:
    path = os.path.join(os.path.dirname(torch.__file__), "lib", LIBRARY)
    try:
        return _Functions(path if os.path.exists(path) else LIBRARY)
    except (ImportError, OSError, AttributeError) as exc:
        log("this torch does not report whether its profiler is active: %s", exc)
        return None
