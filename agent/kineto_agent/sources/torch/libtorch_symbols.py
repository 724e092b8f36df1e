"""C++ functions of the loaded libtorch_cpu that end, save and free a session of torch's profiler without the GIL.

Theory of operation
    Torch's Python functions for this hold the GIL from beginning to end, for microseconds per event. The same C++
    functions are exported, and ctypes.CDLL releases the GIL around a call. Their signatures, which are the same in the
    public headers of all TRUSTED versions:

        std::unique_ptr<ProfilerResult> torch::autograd::profiler::disableProfiler();   the result through a hidden
                                                                                        pointer: one word
        void ProfilerResult::save(const std::string& path);
        ProfilerResult::~ProfilerResult();                                             then ::operator delete

    The std::string is libstdc++'s of the C++11 ABI, built by hand; save's mangled name implies this ABI. If the tracer
    of Python frames is on, these functions take the GIL themselves while they need it.

    A C++ exception would go through ctypes and end the program. disableProfiler throws if no session is on, so it is
    called only if Kineto reports one (kineto_state.py). save has no such check; if it cannot write a file it only logs
    that, and the file is missing afterwards.
"""

import _thread
import contextlib
import ctypes
import os
import re
import sys
from typing import Any, Iterator, List, Optional, Tuple

from kineto_agent.system.debuglog import log
from kineto_agent.system.libraries import Library

# Tested: 2.13 (CPU) and 2.11 (CUDA 13.0). 2.12 lies between, with the same headers and symbols.
TRUSTED = ((2, 11), (2, 12), (2, 13))
_LIBRARY = "libtorch_cpu.so"
_DISABLE = "_ZN5torch8autograd8profiler15disableProfilerEv"
_SAVE = "_ZN5torch8autograd8profiler14ProfilerResult4saveERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_DESTROY = "_ZN5torch8autograd8profiler14ProfilerResultD1Ev"
_DELETE = "_ZdlPv"


class _String(ctypes.Structure):
    """std::__cxx11::string with external text; a reader frees nothing."""

    _fields_ = [("data", ctypes.c_char_p), ("length", ctypes.c_size_t), ("capacity", ctypes.c_size_t * 2)]

    @classmethod
    def of(cls, text: bytes) -> "_String":
        """The text must not be shorter than 16 bytes: it would be stored inside the object."""
        assert len(text) > 15
        return cls(text, len(text), (ctypes.c_size_t * 2)(len(text), 0))


def version_text() -> str:
    """Version of the loaded torch; "" without one."""
    return str(getattr(sys.modules.get("torch"), "__version__", ""))


def version() -> Tuple[int, int]:
    """Major and minor version of the loaded torch; (0, 0) without one, or if it cannot be parsed."""
    found = re.match(r"(\d+)\.(\d+)", version_text())
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def library() -> Library:
    """The loaded libtorch_cpu, opened at the first call. Raises OSError."""
    if not _library:
        torch: Any = sys.modules["torch"]
        path = os.path.join(os.path.dirname(torch.__file__), "lib", _LIBRARY)
        _library.append(Library(path if os.path.exists(path) else _LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    return _library[0]


_library: List[Library] = []


class ProfilerFunctions:
    """The functions. No call holds the GIL. Raises OSError and AttributeError."""

    def __init__(self) -> None:
        found = library()
        self._disable = getattr(found, _DISABLE)
        self._disable.restype = None
        self._disable.argtypes = (ctypes.c_void_p,)
        self._save = getattr(found, _SAVE)
        self._save.restype = None
        self._save.argtypes = (ctypes.c_void_p, ctypes.POINTER(_String))
        self._destroy = getattr(found, _DESTROY)
        self._destroy.restype = None
        self._destroy.argtypes = (ctypes.c_void_p,)
        self._delete = getattr(found, _DELETE)
        self._delete.restype = None
        self._delete.argtypes = (ctypes.c_void_p,)

    def disable(self) -> int:
        """End the running session and return the address of its result (0: none). A session must be running."""
        result = ctypes.c_void_p()
        self._disable(ctypes.byref(result))
        return result.value or 0

    def save(self, result: int, path: str) -> None:
        """Write the result as JSON. At most once for each result; the path has 16 bytes or more."""
        self._save(result, ctypes.byref(_String.of(os.fsencode(path))))

    def free(self, result: int) -> None:
        """Destroy the result."""
        self._destroy(result)
        self._delete(result)


def why_not() -> str:
    """Why the functions cannot be used with this torch; "" if they can."""
    number = version()
    if number not in TRUSTED:
        return "the functions that end a session without the GIL are not verified for torch %d.%d" % number
    return "" if load() is not None else "this torch lacks the functions that end a session without the GIL"


_loaded: List[Optional[ProfilerFunctions]] = []  # cached result


def load() -> Optional[ProfilerFunctions]:
    """The functions of the loaded torch; None if one is missing. Never raises."""
    if not _loaded:
        try:
            _loaded.append(ProfilerFunctions())
        except (OSError, AttributeError, KeyError) as exc:
            log("torch's profiler cannot be ended without the GIL: %s", exc)
            _loaded.append(None)
    return _loaded[0]


class _LogLevel:
    """A log level that stays raised as long as somebody needs it."""

    def __init__(self, name: str, silent: int) -> None:
        self._name = name
        self._silent = silent
        self._lock = _thread.allocate_lock()
        self._wanted = 0
        self._level: List[ctypes.c_int] = []  # empty until looked up
        self._changed: List[Tuple[ctypes.c_int, int]] = []  # the level, and its previous value

    def __enter__(self) -> None:
        with self._lock:
            self._wanted += 1
            try:
                if not self._level:
                    self._level.append(ctypes.c_int.from_address(library().address(self._name)))
            except (OSError, AttributeError, KeyError):
                return
            (level,) = self._level
            if level.value < self._silent:
                self._changed.append((level, level.value))
                level.value = self._silent

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                self._put_back()

    def _put_back(self) -> None:
        changed, self._changed = self._changed, []
        for level, before in reversed(changed):
            if level.value == self._silent:  # the library has not changed it
                level.value = before

    def after_fork_in_child(self) -> None:
        """Reset in a forked child, where the threads that raised it or held the lock do not exist."""
        self._lock = _thread.allocate_lock()
        self._wanted = 0
        self._put_back()


quiet_kineto = _LogLevel("_ZN9libkineto6Logger14severityLevel_E", 6)  # above everything; its "USDT" is above its errors
_quiet_c10 = _LogLevel("FLAGS_caffe2_log_level", 2)  # errors still show: the program may cause some
for _level in (quiet_kineto, _quiet_c10):
    os.register_at_fork(after_in_child=_level.after_fork_in_child)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the block, only c10's errors reach standard error from Kineto and torch. Any thread."""
    with quiet_kineto, _quiet_c10:
        yield
