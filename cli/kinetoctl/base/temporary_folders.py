"""Temporary folders that may be removed while another thread still writes into them.

Theory of operation
    The folder is renamed before its contents are removed. A writer that goes on names files by the old path, which no
    longer exists, so it fails with an OSError instead of adding a file to a folder that is being emptied. For that, no
    writer may create the folder itself anew (Path.mkdir with `parents`). A system call of the writer that had resolved
    the old path before can still add one entry; the contents are then removed once more.
"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_REMOVED = "-removed"  # suffix of the folder's last name
_TRIES = 100  # each costs a writer one more system call that began before the rename


@contextmanager
def removable_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Provides a new folder for the duration of the block. parent: instead of the system's folder for such files."""
    with TemporaryDirectory(prefix=prefix, dir=parent) as name:
        folder = Path(name)
        try:
            yield folder
        finally:
            with suppress(FileNotFoundError):  # somebody else has removed it
                _remove(folder.rename(folder.with_name(folder.name + _REMOVED)))


def _remove(folder: Path) -> None:
    for _ in range(_TRIES - 1):
        try:
            shutil.rmtree(folder)
        except OSError as exc:
            if exc.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    shutil.rmtree(folder)
