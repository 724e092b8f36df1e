"""The first process in a container: `container_init.py [options] -- PROGRAM ARGUMENTS...`. Standard library only."""

import argparse
import ctypes
import os
import platform
from pathlib import Path
from typing import List, NoReturn

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[platform.machine()]
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def _done(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    _done(_libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None), target)


def _enter(root: str, shared: List[str], *, with_proc: bool) -> None:
    """Make it the root; the shared folders lie in /run/0, /run/1, ..."""
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    _mount(root, root, flags=_MS_BIND | _MS_REC)
    for place in ("/tmp", "/run"):
        _mount("tmpfs", root + place, "tmpfs")
    Path(root, "tmp").chmod(0o1777)
    for number, folder in enumerate(shared):
        Path(root, "run", str(number)).mkdir()
        _mount(folder, f"{root}/run/{number}", flags=_MS_BIND)
    if with_proc:
        _mount("proc", root + "/proc", "proc")
    os.chdir(root)
    _done(_libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    _done(_libc.umount2(b".", _MNT_DETACH), "the old root")
    os.chdir("/")


def main() -> NoReturn:
    """Sets the container up and becomes the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root")
    parser.add_argument("--proc", action="store_true")
    parser.add_argument("--share", action="append", default=[])
    parser.add_argument("--user", type=int)
    parser.add_argument("--no-new-privs", action="store_true")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    if options.root:
        _enter(options.root, options.share, with_proc=options.proc)
    if options.user is not None:
        os.setgroups([])
        os.setresgid(options.user, options.user, options.user)
        os.setresuid(options.user, options.user, options.user)
    if options.no_new_privs:
        _done(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    os.execv(options.program[0], options.program)


if __name__ == "__main__":
    main()
