"""The C library of this process, for calls that Python lacks. `ctypes.get_errno` returns their error.

All modules share one object, because creating one costs more than most calls. So the types that a module declares for a
function apply to every other module.
"""

import contextlib
import ctypes
import os
import struct

LIBC = ctypes.CDLL(None, use_errno=True)

_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_VERSION_3 = 0x20080522


def drop_capabilities() -> None:
    """Gives up all capabilities, also under root's uid and after a change of user that keeps them. Raises OSError."""
    with contextlib.suppress(OSError):  # kernels before 4.3 have no ambient capabilities
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header, none = struct.pack("=Ii", _VERSION_3, 0), bytes(24)
    found = ctypes.create_string_buffer(none, len(none))
    if LIBC.capget(ctypes.c_char_p(header), found) == 0 and found.raw == none:
        return  # a unit's filter blocks capset, and makes it unnecessary
    if LIBC.capset(ctypes.c_char_p(header), ctypes.c_char_p(none)):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one value. Raises OSError."""
    if LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
