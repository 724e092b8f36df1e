"""Sizes, digests and removal of files in the store's folders."""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from kinetod.store.path_guard import open_regular


def empty(folder: Path) -> None:
    """Empties a folder but keeps it; a file or link of that name is removed."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()


def folder_bytes(folder: Path) -> int:
    """Total bytes of all files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(root, name).lstat().st_blocks * 512
    return total


def file_digest(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file. Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return os.fstat(file.fileno()).st_size, digest.hexdigest()
