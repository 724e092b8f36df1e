"""Watches a decoder's output from outside: RLIMIT_FSIZE limits one file, and a decoder may create many.

Theory of operation
    Every WATCH_S the target's folder is scanned, without its raw records. A decoder is killed when its output exceeds
    any trace of that many records, or the number of files of any trace, or when it has written much and the disk comes
    close to its reserve, before other captures are ended for that. Files that it has removed but keeps open are not
    visible here.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.base.quantities import format_size

from kinetod.base.errors import VerdictReason
from kinetod.sandbox.confinement import most_output_bytes

WATCH_S = 0.5
MAX_FILES = 4096  # a trace has about 50, and some attachments of a rank
_RAW = "raw"
_BLOCK_BYTES = 512  # of st_blocks, on all file systems
_MUCH_BYTES = 256 << 20  # a decoder that has written less is not what fills the disk
MAX_TRIES = 2
_SUFFIX = ".tries"


class Overrun(Exception):
    """A decoder wrote too much. code: of the verdict."""

    def __init__(self, code: VerdictReason, text: str) -> None:
        super().__init__(text)
        self.code = code


class OutputWatch:
    """Watches the output of one decode. room: free bytes of the disk beyond its reserve."""

    def __init__(self, folder: Path, room: Callable[[], int]) -> None:
        self._folder = folder
        self._room = room
        self._most = 0
        self.bytes = 0

    def look(self) -> None:
        """Checks the folder. Blocking. Raises Overrun, OSError."""
        self._most = self._most or most_output_bytes(self._folder)
        files, self.bytes = measured(self._folder)
        if files > MAX_FILES:
            raise Overrun(VerdictReason.DECODE_FAILED, f"the decoder was killed: it made more than {MAX_FILES} files")
        if self.bytes > self._most:
            text = f"the decoder was killed: it wrote {format_size(self.bytes)}, more than these records can amount to"
            raise Overrun(VerdictReason.DECODE_FAILED, text)
        if self.bytes > _MUCH_BYTES and self._room() <= 0:
            text = (
                f"the decoder was killed: it had written {format_size(self.bytes)} when the disk came close to its "
                "reserve (store.min_free_bytes, store.start_free_bytes)"
            )
            raise Overrun(VerdictReason.DISK_FULL, text)


def measured(folder: Path) -> tuple[int, int]:
    """The number of files and folders, and their bytes on disk; stops counting at MAX_FILES."""
    files = size = 0
    waiting = [str(folder)]
    while waiting and files <= MAX_FILES:
        top = waiting.pop()
        try:
            with os.scandir(top) as entries:
                for entry in entries:
                    if top == str(folder) and entry.name == _RAW:
                        continue
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if files > MAX_FILES:
                        break
        except OSError:  # removed in between, or a path that is too long, whose parent folders are counted
            continue
    return files, size


# Counts unfinished attempts at decoding a folder, in a file FOLDER.tries beside it, which its decoder cannot reach. The
# file is written before each try, so that a try that kills the daemon counts as well; it is removed once there is an
# answer.
def begin(folder: Path) -> bool:
    """Counts one more try and returns whether it is allowed. Raises OSError."""
    count = _count(folder)
    if count >= MAX_TRIES:
        return False
    write_atomically(_file(folder), b"%d" % (count + 1))
    return True


def take_back(folder: Path) -> None:
    """Takes the last try back."""
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
