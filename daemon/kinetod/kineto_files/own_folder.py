"""Our own folder inside the one that a process's libkineto may write to, so that we may remove its files.

Theory of operation
    The owner of a folder with the sticky bit may remove any file in it; others may remove only their own. So a process
    without rights over other users' files (CAP_FOWNER) creates a folder for each trace. An access control list lets the
    process's user write into it, and nobody else even read it; if the file system has no such lists, everybody may
    write, but not list it, and the name of the file cannot be guessed.

    The name contains the time until which the folder is needed, so that a later process can remove it if its creator
    has died.

Rules
    A folder counts as ours only if it belongs to this process's user, has a name of our form, and is not a mount point:
    a process in its own namespace may mount any folder of ours in the place of another. A new one must be unchanged, so
    that a user who may rename in the outer folder cannot replace it by an older one. Only files with names of our form
    are removed, and a folder only when it is empty.
"""

import contextlib
import os
import re
import secrets
import stat
import struct
from itertools import islice

from kinetod.kineto_files.trace_folder import OPEN_FOLDER, TEMPORARY, mount_id

NAME_PATTERN = r"\Akinetod-[0-9a-f]{8,12}-[0-9a-f]{16}\Z"
FILE_PATTERN = r"\Akinetod-[0-9A-Za-z_-]{1,160}\.json\Z"
MAX_LISTED = 4096  # entries of the outer folder that are checked for old ones
MAX_SWEPT = 16  # old ones that are removed at a time
_NAME, _FILE = re.compile(NAME_PATTERN), re.compile(FILE_PATTERN)
_LIST_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ACCESS_LIST = "system.posix_acl_access"  # acl(5); the layout is linux/posix_acl_xattr.h's
_LIST_VERSION, _NO_ID = 2, 0xFFFFFFFF
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
_WRITE = 3  # into the folder: write and enter
_FRESH, _FOR_OWNER, _FOR_USER, _FOR_ALL = 0o700, 0o1700, 0o1730, 0o1733


class NotOurs(OSError):
    """The folder was not created by us."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not a folder that kinetod created")
        self.strerror = str(self)


def make(outer: int, uid: int, until: int) -> tuple[str, int]:
    """Creates a folder that this user may write to; returns its name and descriptor. until: Unix time, in s. Raises
    OSError.
    """
    name = f"kinetod-{until:08x}-{secrets.token_hex(8)}"
    os.mkdir(name, _FRESH, dir_fd=outer)
    try:
        descriptor = _opened(outer, name, fresh=True)
        try:
            _admit(descriptor, uid)
        except BaseException:
            os.close(descriptor)
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=outer)
        raise
    return name, descriptor


def reopen(outer: int, name: str) -> int:
    """Opens a folder that was created before. Raises OSError."""
    if not _NAME.fullmatch(name):
        raise NotOurs(name)
    return _opened(outer, name, fresh=False)


def remove(descriptor: int, name: str) -> None:
    """Removes an open folder with this name; does nothing if it is already gone. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        outer = os.open("..", OPEN_FOLDER, dir_fd=descriptor)
        try:
            there = os.stat(name, dir_fd=outer, follow_symlinks=False)
            if os.path.samestat(there, os.fstat(descriptor)):
                os.rmdir(name, dir_fd=outer)
        finally:
            os.close(outer)


def sweep(outer: int, now_s: float) -> None:
    """Removes folders that are no longer needed, as far as possible."""
    with contextlib.suppress(OSError):
        listed = _names(outer, MAX_LISTED)
        old = [name for name in listed if _NAME.fullmatch(name) and until_s(name) < now_s]
        for name in old[:MAX_SWEPT]:
            with contextlib.suppress(OSError):
                _sweep(outer, name)


def _sweep(outer: int, name: str) -> None:
    descriptor = _opened(outer, name, fresh=None)
    try:
        for each in _names(descriptor, MAX_LISTED):
            if _FILE.fullmatch(each.removesuffix(TEMPORARY)):
                os.unlink(each, dir_fd=descriptor)
        remove(descriptor, name)
    finally:
        os.close(descriptor)


def _opened(outer: int, name: str, *, fresh: bool | None) -> int:
    """Opens a folder of ours. fresh: whether it must be unchanged since its creation, or must not be; None: either."""
    descriptor = os.open(name, OPEN_FOLDER, dir_fd=outer)
    try:
        found = os.fstat(descriptor)
        is_fresh = stat.S_IMODE(found.st_mode) & 0o1777 == _FRESH
        if found.st_uid != os.geteuid() or mount_id(descriptor) != mount_id(outer) or fresh not in (None, is_fresh):
            raise NotOurs(name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _admit(descriptor: int, uid: int) -> None:
    """Lets the user write into the folder."""
    readable = os.open(".", _LIST_FOLDER, dir_fd=descriptor)  # descriptors opened by path only have no rights
    try:
        mode = _FOR_OWNER
        if uid != os.geteuid():
            mode = _FOR_USER
            try:
                os.setxattr(readable, _ACCESS_LIST, _access_list(uid))
            except OSError:  # the file system has no lists, or does not know the user
                mode = _FOR_ALL
        os.fchmod(readable, mode)
    finally:
        os.close(readable)


def _access_list(uid: int) -> bytes:
    entries = ((_OWNER, 7, _NO_ID), (_USER, _WRITE, uid), (_GROUP, 0, _NO_ID), (_MASK, _WRITE, _NO_ID))
    packed = (struct.pack("<HHI", *entry) for entry in (*entries, (_OTHERS, 0, _NO_ID)))
    return struct.pack("<I", _LIST_VERSION) + b"".join(packed)


def _names(folder: int, most: int) -> list[str]:
    listing = os.open(".", _LIST_FOLDER, dir_fd=folder)
    try:
        with os.scandir(listing) as entries:
            return [entry.name for entry in islice(entries, most)]
    finally:
        os.close(listing)


def until_s(name: str) -> int:
    """The Unix time until which the folder is needed, from its name."""
    return int(name.split("-")[1], 16)
