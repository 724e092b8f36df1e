"""How often decoding a folder was begun and not ended, kept beside the folder, where its decoder cannot reach it.

A file of the name FOLDER.tries with a number. It is written before a try, so that also a try that ends the daemon
counts; whoever gets an answer removes it.
"""

import contextlib
import os
from pathlib import Path

from kineto_trace.base.atomic_files import write_atomically

MAX_TRIES = 2
_SUFFIX = ".tries"


def begin(folder: Path) -> bool:
    """Whether it may be tried once more, which is then noted. Raises OSError."""
    count = _count(folder)
    if count >= MAX_TRIES:
        return False
    write_atomically(_file(folder), b"%d" % (count + 1))
    return True


def take_back(folder: Path) -> None:
    """The last try does not count."""
    with contextlib.suppress(OSError):
        write_atomically(_file(folder), b"%d" % max(0, _count(folder) - 1))


def forget(folder: Path) -> None:
    """Forgets the tries of a folder that was decoded or refused."""
    with contextlib.suppress(OSError):
        _file(folder).unlink(missing_ok=True)


def _count(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(_file(folder), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return int(file.read(8))
    return 0


def _file(folder: Path) -> Path:
    return folder.with_name(folder.name + _SUFFIX)
