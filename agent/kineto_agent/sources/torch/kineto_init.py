"""Starts Kineto in a process, on our thread, without any output on the program's standard error.

Theory of operation
    Torch starts Kineto when its profiler is prepared for the first time: libkineto_init, then the log level. On
    another thread than the one that loaded libtorch_cpu, the former prints an ERROR straight to standard error,
    whatever the log level, and leaves out torch's own initialisation: libkineto::LibkinetoApi remembers which thread
    called registerClient. It also sets the log level from the environment, so that further messages in the same call of
    torch are printed.

    So all this is done here, before torch's profiler is prepared: the client that torch registered is registered
    once more, from this thread (before Kineto has a profiler, that only stores the thread), then Kineto is initialised
    as torch does it. Torch then uses the initialised Kineto quietly (libtorch_symbols.py).

    If the object's layout is unknown, or a function is missing, nothing is touched and the recording is refused,
    because it would print.
"""

import ctypes
import os
import sys
from typing import Any

from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.torch import libtorch_symbols
from kineto_agent.sources.torch.kineto_state import LIBRARY, PROFILER, word

_API = "_ZN9libkineto3apiEv"
_REGISTER_CLIENT = "_ZN9libkineto12LibkinetoApi14registerClientEPNS_15ClientInterfaceE"
_CLIENT = 16  # in libkineto::LibkinetoApi: after the reference to the ConfigLoader and the profiler
_OTHER_DEVICES = {"CUDA", "XPU", "MTIA"}


def start_quietly(maps: str = "/proc/self/maps") -> None:
    """Initialise Kineto unless that has been done. Call it under libtorch_symbols.quiet().

    Raises SourceError if it is not initialised and cannot be without printing: TORCH_PROFILER_UNAVAILABLE.
    """
    try:
        library = libtorch_symbols.library()
        api = _function(library, _API)
        api.restype = ctypes.c_void_p
        address = api()
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if word(memory, address + PROFILER):
                return
            client = word(memory, address + _CLIENT)
            if client and not _is_in_library(word(memory, client), maps):
                raise OSError("its client is of an unknown form")
        finally:
            os.close(memory)
        register, initialise, suppress = (
            _function(library, name) for name in (_REGISTER_CLIENT, "libkineto_init", "suppressLibkinetoLogMessages")
        )
        cpu_only = _cpu_only()
    except (OSError, AttributeError, KeyError, TypeError) as exc:
        raise SourceError(
            "TORCH_PROFILER_UNAVAILABLE",
            "torch's profiler was never used in this process, and torch %s would print to the program's standard "
            "error when it is started from outside (%s: %s): trace without the options that need it"
            % (libtorch_symbols.version_text() or "of unknown version", type(exc).__name__, exc),
        ) from exc
    if client:
        register(ctypes.c_void_p(address), ctypes.c_void_p(client))
    initialise(ctypes.c_bool(cpu_only), ctypes.c_bool(True))
    suppress()


def _function(library: ctypes.CDLL, name: str) -> Any:
    found = getattr(library, name)
    found.restype = None
    return found


def _cpu_only() -> bool:
    """Torch's argument for Kineto: whether there is neither another device nor a backend outside torch."""
    torch_c: Any = sys.modules["torch._C"]
    supported = {activity.name for activity in sys.modules["torch._C._autograd"]._supported_activities()}
    return not supported & _OTHER_DEVICES and torch_c._get_privateuse1_backend_name() == "privateuseone"


def _is_in_library(address: int, maps: str) -> bool:
    """Whether the address lies in a mapping of libtorch_cpu."""
    with open(maps, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if line.rstrip("\n").endswith("/" + LIBRARY):
                first, _, last = line.split(None, 1)[0].partition("-")
                if int(first, 16) <= address < int(last, 16):
                    return True
    return False
