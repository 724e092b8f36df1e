"""Checks who could change plug-ins' files: they run in processes of every user, so only root and the daemon's user
may.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_FILES = 2000  # of one package
ROOT = frozenset((0,))
_MOST_LINKS = 40  # on one path, like the kernel's limit
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids() -> frozenset[int]:
    """Root, and the user of this process."""
    return frozenset((0, os.geteuid()))


def problem_of(paths: Iterable[Path], uids: frozenset[int]) -> str:
    """Why others could change one of these files or folders, or their contents; "" if they cannot.

    The path counts too: a user who can rename a folder or a link on it can replace it.
    """
    checked: set[tuple[Path, bool]] = set()
    for path in paths:
        try:
            for number, each in enumerate(_with_contents(path)):
                if number >= MAX_FILES:
                    return f"{path} has more than {MAX_FILES} files"
                if problem := _problem_of_way(each, uids, checked):
                    return problem
        except OSError as exc:
            return f"{exc.filename} cannot be examined: {exc.strerror}"
    return ""


def _with_contents(path: Path) -> Iterator[Path]:
    """Also yields contents of folders that links lead to. Each folder is yielded before it is read. Raises OSError."""
    yield path
    folders, seen = [path], set()
    while folders:
        folder = folders.pop()
        if not folder.is_dir() or (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        for entry in sorted(folder.iterdir()):
            yield entry
            folders.append(entry)


def _problem_of_way(path: Path, uids: frozenset[int], checked: set[tuple[Path, bool]]) -> str:
    way = list(_way(path))
    for place in way:
        key = place, place == way[-1]
        if key not in checked:
            checked.add(key)
            if problem := _problem(*key, uids):
                return problem
    return ""


def _way(path: Path) -> Iterator[Path]:
    """Yields every folder and link on the kernel's path to it, and finally the target. Raises OSError."""
    at, links = Path("/"), 0
    left = [*reversed(Path(os.path.abspath(path)).parts[1:])]  # noqa: PTH100 - links are followed here
    yield at
    while left:
        at = at.parent if (part := left.pop()) == ".." else at / part
        yield at
        if at.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = at.readlink()
            at = Path("/") if target.is_absolute() else at.parent
            left += reversed(target.parts[target.is_absolute() :])


def _problem(path: Path, is_found: bool, uids: frozenset[int]) -> str:
    """is_found: it is loaded itself, or contains what is loaded, and is not merely on the path."""
    status = path.lstat()
    if status.st_uid not in uids:
        return f"{path} belongs to uid {status.st_uid}; run `chown root {path}`"
    # Like /tmp: nobody can remove or rename others' entries. But anybody can add something that the import would find
    # first.
    is_guarded = not is_found and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(status.st_mode) and not is_guarded:
        return f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):04o}); run `chmod go-w {path}`"
    return ""
