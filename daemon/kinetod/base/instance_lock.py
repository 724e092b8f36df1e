"""One daemon per state folder and per agent socket: flock, which the kernel frees when the daemon dies."""

import fcntl
import os
from pathlib import Path
from typing import Self

from kinetod.base.errors import StartError


class Lock:
    """Holds an exclusive lock on a file until `release` or the end of the process."""

    def __init__(self, path: Path, protects: str) -> None:
        """Takes the lock. Raises StartError if another daemon has it; `protects` names the shared thing."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as exc:
            raise StartError(
                f"cannot open the lock file {path}: {exc.strerror}. If another user's kinetod created it (sudo "
                f"kinetod), give {path.parent} and everything in it to this user (chown -R), or use another folder"
            ) from exc
        except OSError as exc:
            raise StartError(f"cannot open the lock file {path}: {exc.strerror}") from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StartError(
                f"another kinetod (pid {holder}) is already using {protects}; stop it, or give this one a different "
                "--state-dir, --agent-socket and --listen"
            ) from exc
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Releases the lock. The file stays, so that nobody can lock a removed one."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()
