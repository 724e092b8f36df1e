"""This process's capabilities (capabilities(7)), which it can give up for good."""

import contextlib
import ctypes
import os
import struct

from kinetod.base.libc import LIBC

_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_VERSION_3 = 0x20080522


def drop_capabilities() -> None:
    """Gives all of them up, also under root's number and after a change of user, which keeps them. Raises OSError."""
    with contextlib.suppress(OSError):  # kernels before 4.3 have no ambient ones
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header, none = struct.pack("=Ii", _VERSION_3, 0), bytes(24)
    found = ctypes.create_string_buffer(none, len(none))
    if LIBC.capget(ctypes.c_char_p(header), found) == 0 and found.raw == none:
        return  # a unit's filter does not let capset through, and has no need to
    if LIBC.capset(ctypes.c_char_p(header), ctypes.c_char_p(none)):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one value. Raises OSError."""
    if LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
