"""A file system of its own that is soon full, of bytes or of inodes. Needs root."""

import contextlib
import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import until


@contextlib.contextmanager
def small_disk(options: str) -> Iterator[Path]:
    """Mounts a tmpfs with these options, such as size=24m,nr_inodes=40. Skips the test where nothing may be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="kinetod-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", options, "kinetod-test", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        folder.rmdir()
        pytest.skip("cannot mount a tmpfs")
    try:
        yield folder
    finally:
        unmount = ["umount", str(folder)]  # what a daemon has killed may still be ending
        until(lambda: subprocess.run(unmount, capture_output=True).returncode == 0, "nobody uses the disk", pause_s=0.1)
        folder.rmdir()


def fill(folder: Path, *, inodes: bool = False) -> Path:
    """Takes every byte or inode that is left. Returns what gives them back when it is removed: a folder."""
    taken = folder / "filler"
    taken.mkdir()
    with contextlib.suppress(OSError):
        for number in itertools.count() if inodes else ():
            (taken / str(number)).touch()
        with (taken / "bytes").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    return taken
