"""Common parts of the collector library's C interfaces, through ctypes.

Each interface exists once in a process and has its own version number (`*_abi`). On failure its functions return a
negative number and a text.
"""

import ctypes
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Sequence, Type, TypeVar

from kineto_agent.sources import collector_library
from kineto_agent.sources.interface import SourceError
from kineto_agent.system.libraries import Library

_ERROR_BYTES = 1024


class NativeCounts(ctypes.Structure):
    """kc_counts."""

    records: int
    bytes: int
    dropped: int
    _fields_ = [("records", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("dropped", ctypes.c_uint64)]


class ErrorText:
    """The buffer in which a function explains its failure. `room` holds its last two arguments."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_ERROR_BYTES)
        self.room = self._buffer, ctypes.c_size_t(_ERROR_BYTES)

    def clear(self) -> None:
        """Empty the buffer, before a call that does not write to it on success."""
        self._buffer.value = b""

    def __str__(self) -> str:
        return self._buffer.value.decode("utf-8", "replace")


class EnableResult(NamedTuple):
    """A vendor library's results when recording begins."""

    code: int  # 0, or the kc_error
    results: Dict[int, int]  # activity kind -> the library's result
    error: str


def enable(start: Callable[..., int], kinds: Sequence[int], error: ErrorText) -> EnableResult:
    """Begin to record. start: the C function, given kinds, their number, room for results, and `error`."""
    results = (ctypes.c_int32 * len(kinds))()
    wanted = (ctypes.c_uint32 * len(kinds))(*kinds)
    error.clear()
    code = start(wanted, len(kinds), results, *error.room)
    return EnableResult(code, dict(zip(kinds, results)), str(error))


if TYPE_CHECKING:  # as loaded into a process, hints cannot be called
    _Interface = TypeVar("_Interface", bound="NativeInterface")

_loaded: Dict[Type["NativeInterface"], Any] = {}


class NativeInterface:
    """One interface of the library, loaded and of the right version. Raises SourceError: COLLECTOR_MISSING."""

    ABI_FUNCTION: str  # returns the version number
    ABI: int  # the version that this agent needs
    USE = ""  # purpose of the interface, for messages
    REASONS: Dict[int, str]  # error number -> reason code
    BY_PROGRAM: Sequence[str] = ()  # functions called on threads of the program: they are looked up beforehand

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._library: Any = Library(path)
            abi = getattr(self._library, self.ABI_FUNCTION)()
        except (OSError, AttributeError) as exc:
            raise SourceError(
                "COLLECTOR_MISSING",
                "the agent's native collector cannot be loaded (%s): install kineto-agent from a wheel for this "
                "platform, or run `python agent/native/build_hook.py` in a checkout" % exc,
            ) from exc
        if abi != self.ABI:
            raise SourceError(
                "COLLECTOR_MISSING",
                "%s has interface version %d%s, but this agent needs %d: reinstall kineto-agent so that both match"
                % (path, abi, self.USE, self.ABI),
            )
        for name in self.BY_PROGRAM:
            getattr(self._library, name)
        self._error = ErrorText()

    @classmethod
    def of_process(cls: "Type[_Interface]") -> "_Interface":
        """The process's one, loaded at the first call. Raises SourceError."""
        if cls not in _loaded:
            _loaded[cls] = cls(collector_library.path())
            collector_library.loaded()
        one: _Interface = _loaded[cls]
        return one

    def _check(self, code: int) -> int:
        """Return the result of a function, or raise SourceError if it is an error."""
        if code < 0:
            raise SourceError(self.REASONS[code], str(self._error))
        return code
