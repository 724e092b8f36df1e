"""What the C interfaces of the collector library have in common, through ctypes. Imported when a capture is prepared.

Each of them is one object in a process, has a number of its own (`*_abi`), and functions that give a negative number
and a text where they fail.
"""

import ctypes
from typing import Any, Dict

from kineto_agent.sources.interface import SourceError

_ERROR_BYTES = 1024


class NativeCounts(ctypes.Structure):
    """kc_counts."""

    records: int
    bytes: int
    dropped: int
    _fields_ = [("records", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("dropped", ctypes.c_uint64)]


class ErrorText:
    """Where a function writes why it fails. `room` is its last two arguments."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_ERROR_BYTES)
        self.room = self._buffer, ctypes.c_size_t(_ERROR_BYTES)

    def clear(self) -> None:
        """Before a call that says nothing when it succeeds."""
        self._buffer.value = b""

    def __str__(self) -> str:
        return self._buffer.value.decode("utf-8", "replace")


class NativeInterface:
    """One interface of the library, loaded and of the right number. Raises SourceError: COLLECTOR_MISSING."""

    ABI_FUNCTION: str  # gives the number
    ABI: int  # that this agent needs
    USE = ""  # what the interface is for, in texts
    REASONS: Dict[int, str]  # error number -> reason code

    def __init__(self, path: str) -> None:
        try:
            self._library: Any = ctypes.CDLL(path)
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
                "%s has interface %d%s, this agent needs %d: reinstall kineto-agent so that both are of one version"
                % (path, abi, self.USE, self.ABI),
            )
        self._error = ErrorText()

    def _check(self, code: int) -> int:
        """The answer of a function, if it is none of its errors."""
        if code < 0:
            raise SourceError(self.REASONS[code], str(self._error))
        return code
