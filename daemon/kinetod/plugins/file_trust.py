"""Who could change a plug-in's files: they run in processes of every user, so only root and the daemon's user may."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_FILES = 2000  # of one package
ROOT = frozenset((0,))
_MOST_LINKS = 40  # on one way, as for the kernel
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids() -> frozenset[int]:
    """Root, and the user of this process."""
    return frozenset((0, os.geteuid()))


def problem_of(paths: Iterable[Path], uids: frozenset[int]) -> str:
    """Why one of these files or folders, or of what is in them, could be changed by others; "" if none could.

    The way there counts too: whoever can rename a folder or a link can put another one in its place.
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
    """Yields also what lies in folders that links lead to. Each folder is yielded before it is read. Raises OSError."""
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
    """Every folder and link that the kernel passes on its way there, and last what it finds. Raises OSError."""
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
    """is_found: it is what is loaded, or has that in it, and does not only lie on the way."""
    status = path.lstat()
    if status.st_uid not in uids:
        return f"{path} belongs to uid {status.st_uid}; run `chown root {path}`"
    # As /tmp: nobody removes or renames what others have there. But anybody can add what the import would find first.
    is_guarded = not is_found and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(status.st_mode) and not is_guarded:
        return f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):04o}); run `chmod go-w {path}`"
    return ""
