"""Who could change a plug-in's files: they run in processes of every user, so only root and the daemon's user may."""

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_FILES = 2000  # of one package
ROOT = frozenset((0,))
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids() -> frozenset[int]:
    """Root, and the user of this process."""
    return frozenset((0, os.geteuid()))


def problem_of(paths: Iterable[Path], uids: frozenset[int]) -> str:
    """Why one of these files or folders, or of what is in them, could be changed by others; "" if none could.

    The way there counts too: whoever can rename a folder can put another one in its place.
    """
    checked: set[Path] = set()
    for path in paths:
        for each in _with_contents(path):
            for place in _way(each):
                if place in checked:
                    continue
                checked.add(place)
                if problem := _problem(place, uids):
                    return problem
            if len(checked) > MAX_FILES:
                return f"{path} has more than {MAX_FILES} files"
    return ""


def _with_contents(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                yield Path(folder, name)


def _way(path: Path) -> Iterator[Path]:
    """The path and all folders above it, as it is named and as its links lead."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links that are looked at here
    for named in (absolute, absolute.resolve()):
        yield named
        yield from named.parents


def _problem(path: Path, uids: frozenset[int]) -> str:
    try:
        status = path.lstat()
    except OSError as exc:
        return f"{path} cannot be examined: {exc.strerror}"
    if status.st_uid not in uids:
        return f"{path} belongs to uid {status.st_uid}; run `chown root {path}`"
    is_guarded = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX  # as /tmp: nobody removes others' files
    if status.st_mode & _OTHERS_WRITE and not stat.S_ISLNK(status.st_mode) and not is_guarded:
        return f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):04o}); run `chmod go-w {path}`"
    return ""
