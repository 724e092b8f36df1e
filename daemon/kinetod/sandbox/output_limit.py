"""What a decoder writes, watched from outside: RLIMIT_FSIZE bounds one file, and a decoder may make many.

Theory of operation
    Every WATCH_S the target's folder is looked through, without its raw records. A decoder ends when there is more than
    any trace of so many records can amount to, or more files than any has, or when it has written much and the disk
    comes close to its reserve: before the captures of others are ended for that. What it holds open and has
    removed is not seen here.
"""

import os
from collections.abc import Callable
from pathlib import Path

from kineto_protos.units import format_size

from kinetod.base.errors import VerdictReason
from kinetod.sandbox.confinement import most_output_bytes

WATCH_S = 0.5
MAX_FILES = 4096  # a trace has some 50, and a few of a rank's attachments
_RAW = "raw"
_BLOCK_BYTES = 512  # of st_blocks, on all file systems
_MUCH_BYTES = 256 << 20  # a decoder that has written less is not what fills the disk


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
        """Blocking. Raises Overrun, OSError."""
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
    """Files, folders included, and the bytes that they take on disk; no more than MAX_FILES are looked at."""
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
        except OSError:  # removed meanwhile, or a path that is too long, of which the folders above are counted
            continue
    return files, size
