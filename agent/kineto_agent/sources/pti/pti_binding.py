"""Checks whether PTI may be used, through the C interface of agent/native/pti/pti.h. Imported when a capture is
prepared.

Every call releases the GIL.
"""

import ctypes
import os
import sys

from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.native_interface import NativeInterface

_VERSION_BYTES = 64
# level_zero_state -> reason code
_STATES = {1: "XPU_NOT_INITIALIZED", 2: "XPU_NO_DEVICE", 3: "XPU_NO_TRACING", 4: "XPU_NO_INTROSPECTION"}
_HELP = {
    "XPU_NOT_INITIALIZED": "trace again once the program has used its GPU",
    "XPU_NO_DEVICE": "only programs with an Intel GPU can be traced this way",
    "XPU_NO_TRACING": "install a newer Level Zero loader with its layers (Debian, Ubuntu: libze1), and start the "
    "program again",
    "XPU_NO_INTROSPECTION": "if the driver is the reason, install a newer one",
}
_REASONS = {-1: "PTI_LIBRARY", -2: "PTI_FAILED", -3: "PTI_FAILED", -4: "PTI_FAILED", -5: "PTI_FORKED"}
_NO_CORE, _UNGUARDED = 1, 2  # of kc_pti_core


class PtiChecks(NativeInterface):
    """The checks, in their order. Methods raise SourceError if a check fails."""

    ABI_FUNCTION = "kc_pti_abi"
    ABI = 1
    USE = " for PTI"
    REASONS = _REASONS

    def look(self) -> None:
        """Check that Level Zero has a GPU that can be traced, without loading PTI."""
        state = self._check(self._library.kc_pti_look(*self._error.room))
        if state:
            reason = _STATES[state]
            raise SourceError(
                reason, "Intel GPUs cannot be traced in this process: %s; %s" % (self._error, _HELP[reason])
            )

    def version(self, path: str) -> str:
        """Load libpti_view, if the process has not, and return its version ("1.0.1")."""
        version = ctypes.create_string_buffer(_VERSION_BYTES)
        room = version, ctypes.c_size_t(_VERSION_BYTES)
        self._check(self._library.kc_pti_version(os.fsencode(path), *room, *self._error.room))
        return version.value.decode("ascii", "replace")

    def core(self, path: str) -> None:
        """Make it load its core, and protect forked children from it."""
        answer = self._check(self._library.kc_pti_core(*self._error.room))
        if answer == _NO_CORE:
            raise SourceError(
                "PTI_CORE",
                "%s (%s): install intel-pti with all its dependencies (%s -m pip install intel-pti "
                "intel-cmplr-lib-rt); before version 1.0, the folder of libpti.so must be in LD_LIBRARY_PATH when the "
                "program starts" % (self._error, path, sys.executable or "python3"),
            )
        if answer == _UNGUARDED:
            raise SourceError("PTI_UNSAFE", "PTI was not used: %s (%s)" % (self._error, path))
