"""The C library of this process, for calls that Python lacks. `ctypes.get_errno` returns their error.

All modules share one object, because creating one costs more than most calls. So the types that a module declares for a
function apply to every other module.
"""

import contextlib
import ctypes
import os
import pwd
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.process_vm_readv.restype = ctypes.c_ssize_t
LIBC.process_vm_writev.restype = ctypes.c_ssize_t

NOBODYS_GROUP = 65534  # for a user without an entry in the host's database
PTRACE_CAPABILITY = 19  # CAP_SYS_PTRACE
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4
_PR_SET_SECUREBITS, _SECBIT_NOROOT = 28, 1
_PR_SET_KEEPCAPS = 8
_VERSION_3 = 0x20080522
_CAPABILITIES = struct.Struct("=6I")  # effective, permitted and inheritable: of the first 32, then of the others
_NONE = bytes(_CAPABILITIES.size)


class Iovec(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def drop_capabilities() -> None:
    """Gives up all capabilities, also under root's uid and after a change of user that keeps them. Raises OSError."""
    keep_capabilities(0)


def keep_only(capability: int) -> None:
    """Gives up all capabilities but this one, which its programs have as well, as far as it has it. Raises OSError."""
    with contextlib.suppress(OSError):  # root's programs would have all others again
        prctl(_PR_SET_SECUREBITS, _SECBIT_NOROOT)
    keep_capabilities(1 << capability)
    with contextlib.suppress(OSError):  # it does not have it
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def keep_capabilities(kept: int) -> None:
    """Gives up all capabilities but these of the first 32, as far as it has them. Raises OSError."""
    with contextlib.suppress(OSError):  # kernels before 4.3 have no ambient capabilities
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _VERSION_3, 0)
    found = ctypes.create_string_buffer(_NONE, len(_NONE))
    if LIBC.capget(ctypes.c_char_p(header), found) == 0:
        if found.raw == _NONE:
            return  # a unit's filter blocks capset, and makes it unnecessary
        kept &= _CAPABILITIES.unpack(found.raw)[1]
    if LIBC.capset(ctypes.c_char_p(header), ctypes.c_char_p(_CAPABILITIES.pack(kept, kept, kept, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def change_user(uid: int) -> None:
    """Permanently changes groups, group and user. Raises OSError."""
    gid = _change_groups(uid)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def become(uid: int) -> None:
    """Changes the user for good as change_user does, but keeps what capabilities there are. Raises OSError.

    All three uids change: a program that is started with two different ones counts as set-uid, and loses its ambient
    capabilities on some kernels (seen on 6.1, not on 6.18).
    """
    prctl(_PR_SET_KEEPCAPS, 1)
    change_user(uid)


def _change_groups(uid: int) -> int:
    """Returns the user's own group."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        os.setgroups([])
        return NOBODYS_GROUP
    os.initgroups(entry.pw_name, entry.pw_gid)
    return entry.pw_gid


def prctl(option: int, value: int, more: int = 0) -> None:
    """prctl(2) with one value, or two. Raises OSError."""
    if LIBC.prctl(option, value, more, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
