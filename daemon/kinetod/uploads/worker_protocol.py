"""The protocol between the daemon and its upload worker, and their errors.

The worker reads one JSON object per line and answers in the same form. An answer with `bytes` is followed by as many
raw bytes. `{"id": n, "progress": …}` may come any number of times before `{"id": n, "ok": …}`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kineto_trace.store.upload_manifest import BLOCK_BYTES as BLOCK_BYTES
from kineto_trace.store.upload_manifest import MANIFEST as MANIFEST
from kineto_trace.store.upload_manifest import Stored as Stored

STATE_FILE = "upload.json"  # in the capture's folder
PART_BYTES = 16 << 20  # of a multipart upload; S3 takes 5 MiB to 5 GiB
MAX_PARTS = 10_000
Progress = Callable[[int], None]  # bytes more; raises Cancelled


class UploadError(Exception):
    """A transfer failed; another try may succeed. The text has no secrets."""


class LocalDamage(UploadError):
    """A local file is not what the capture's record says; trying again is useless."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class RemoteDamage(UploadError):
    """An object is missing or not what was uploaded."""


class Cancelled(UploadError):
    """The daemon does not want this any more."""

    def __init__(self) -> None:
        super().__init__("cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options that a worker gets at its start; new options need a new worker."""

    bytes_per_second: int = 0  # of all uploads together; 0: no limit
    endpoint: str = ""  # of an S3-compatible store; empty: Amazon's, or what the environment says
    timeout_s: float = 60.0  # of one request
    folders: tuple[str, ...] = ()  # of this machine, to which captures are or were uploaded
