"""The collector kit's C interface (agent/native/kit/kit.h) through ctypes. Imported when a capture is prepared.

Every call releases the GIL. The mirror of the C structures is checked by `kc_kit_abi` when the library is loaded.
"""

import ctypes
import functools
import json
import os
from typing import Any, Dict, Sequence

from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.kit.claims import Claim
from kineto_agent.sources.native_interface import EnableResult, ErrorText, NativeCounts, NativeInterface, enable

_LIBRARY, _SYSTEM, _VENDOR, _ORDER, _FORKED = -1, -2, -3, -4, -5
_SUFFIXES = {_LIBRARY: "LIBRARY", _VENDOR: "FAILED", _ORDER: "BUSY", _FORKED: "FORKED"}
_ARENA_FAILED = "ARENA_FAILED"
_FACTS_BYTES = 64 * 1024


class KitConfig(ctypes.Structure):
    """kit_config."""

    _fields_ = [
        ("buffer_limit_bytes", ctypes.c_uint64),
        ("buffer_bytes", ctypes.c_uint64),
        ("strings_bytes", ctypes.c_uint64),
        ("prefault_bytes", ctypes.c_uint64),
        ("flush_period_ms", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class KitResult(ctypes.Structure):
    """kit_stop_result."""

    counts: NativeCounts
    cpu_ns: int
    names_lost: int
    irregular_records: int
    withheld: int
    timed_out: int
    flushes: int
    flush_result: int
    uncounted: int
    _fields_ = [
        ("counts", NativeCounts),
        ("cpu_ns", ctypes.c_uint64),
        ("names_lost", ctypes.c_uint64),
        ("irregular_records", ctypes.c_uint64),
        ("withheld", ctypes.c_uint32),
        ("timed_out", ctypes.c_uint32),
        ("flushes", ctypes.c_uint32),
        ("flush_result", ctypes.c_int32),
        ("uncounted", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Kit(NativeInterface):
    """The kit of this process's collector library."""

    ABI_FUNCTION = "kc_kit_abi"
    ABI = 1
    USE = " for vendors' libraries"
    REASONS = _SUFFIXES  # appended to each vendor's prefix
    BY_PROGRAM = ("kc_kit_stop",)

    def open(self, vendor: str, title: str, code: str, path: str) -> "KitCollector":
        """Open a vendor's library at `path` and return its collector.

        vendor: a name in the collector library, or the path of a plug-in's shared library. title: for people. code:
        prefix of the reason codes. Raises SourceError.
        """
        version = ctypes.c_uint64()
        error = ErrorText()
        number = self._library.kc_kit_open(os.fsencode(vendor), os.fsencode(path), ctypes.byref(version), *error.room)
        if number < 0:
            raise SourceError(reason_code(number, code), str(error))
        return KitCollector(self._library, number, version.value, Claim(code.lower(), title, self.path, code + "_BUSY"))


def reason_code(number: int, code: str) -> str:
    """The reason code of a kc_error. code: the vendor's prefix."""
    return _ARENA_FAILED if number == _SYSTEM else "%s_%s" % (code, _SUFFIXES[number])


class KitCollector:
    """One vendor's collector. Methods raise SourceError with the C side's reason."""

    def __init__(self, library: Any, number: int, version: int, claim: Claim) -> None:
        self.version = version
        self._library = library
        self._number = number
        self._claim = claim
        self._error = ErrorText()

    def describe(self) -> Dict[str, Any]:
        """The vendor's facts for the metadata; {} if it has none, or if they are not a JSON object."""
        room = ctypes.create_string_buffer(_FACTS_BYTES)
        self._library.kc_kit_describe(self._number, room, ctypes.c_size_t(_FACTS_BYTES))
        try:
            facts = json.loads(room.value.decode("utf-8", "replace"))
        except ValueError:
            return {}
        return facts if isinstance(facts, dict) else {}

    def prepare(self, config: KitConfig, code: str) -> int:
        """Make the arena and return its file descriptor, which the collector keeps."""
        self._claim.take()
        descriptor: int = self._library.kc_kit_prepare(self._number, ctypes.byref(config), *self._error.room)
        if descriptor < 0:
            self._claim.release()
            raise SourceError(reason_code(descriptor, code), str(self._error))
        return descriptor

    def start(self, kinds: Sequence[int]) -> EnableResult:
        """Begin to record; never raises."""
        return enable(functools.partial(self._library.kc_kit_start, self._number), kinds, self._error)

    def counts(self) -> NativeCounts:
        """Counts so far; zeros when nothing is recorded."""
        counts = NativeCounts()
        self._library.kc_kit_counts(self._number, ctypes.byref(counts))
        return counts

    def stop(self, limit_ms: int) -> KitResult:
        """End the recording, on any thread. Zeros when nothing was recorded (or in a forked child)."""
        result = KitResult()
        self._library.kc_kit_stop(self._number, limit_ms, ctypes.byref(result))
        return result

    def problem(self) -> str:
        """Why less was recorded than requested; "" if nothing is missing. After stop()."""
        self._error.clear()
        self._library.kc_kit_problem(self._number, *self._error.room)
        return str(self._error)

    def close(self) -> None:
        """Free the arena, unless the library still uses it."""
        self._library.kc_kit_close(self._number)
        self._claim.release()

    def result_text(self, result: int) -> str:
        """The library's text for one of its results."""
        self._library.kc_kit_result_text(self._number, result, *self._error.room)
        return str(self._error)
