"""Landlock: after `restrict` this process and its threads can open only what the rules name.

Uses the kernel's three system calls: the version (ABI) of the running kernel determines what can be handled, and all of
that is. Landlock does not cover stat, chmod, xattrs and sockets with a path; `seccomp_filter` closes these.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from kinetod.base.libc import LIBC

# The same numbers on all machines (include/uapi/asm-generic/unistd.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1

EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 5, 1 << 7, 1 << 8
_TRUNCATE = 1 << 14  # ABI 3
READ = _READ_FILE | _READ_DIR
OWN = READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
_FOR_FILES = EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

# How many rights of each kind an ABI has: on files; on TCP ports; on abstract sockets and signals.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NETWORK_ABI, _NETWORK = 4, 0b11
_SCOPE_ABI, _SCOPES = 6, 0b11


def abi() -> int:
    """The version of Landlock in this kernel; 0: none, or not permitted."""
    version = LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG))
    return max(0, int(version))


def restrict(rules: Iterable[tuple[Path, int]], version: int, *, network: bool = False) -> None:
    """Restricts this process to the rights of the rules, each for a path and everything below. Raises OSError.

    Needs no_new_privs. Existing threads stay unrestricted: call it while there is one. version: abi(), not 0. network:
    whether TCP stays unrestricted.
    """
    handled = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    attributes = struct.pack(
        "=QQQ",
        handled,
        _NETWORK if version >= _NETWORK_ABI and not network else 0,
        _SCOPES if version >= _SCOPE_ABI else 0,
    )
    size = 24 if version >= _SCOPE_ABI else 16 if version >= _NETWORK_ABI else 8
    ruleset = _call(_CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # an unreachable path needs no rule
    try:
        rule = struct.pack("=Qi", rights if _is_folder(descriptor) else rights & _FOR_FILES, descriptor)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint(0))
    finally:
        os.close(descriptor)


def _is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def _call(number: int, *arguments: object) -> int:
    result = int(LIBC.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
