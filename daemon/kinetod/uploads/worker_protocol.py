"""The protocol between the daemon and its upload worker, and their errors.

The worker reads one JSON object per line and answers in the same form. An answer with `bytes` is followed by as many
raw bytes. `{"id": n, "progress": …}` may come any number of times before `{"id": n, "ok": …}`.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kineto_trace.store.upload_manifest import BLOCK_BYTES as BLOCK_BYTES
from kineto_trace.store.upload_manifest import MANIFEST as MANIFEST
from kineto_trace.store.upload_manifest import Stored as Stored

from kinetod.base.safe_text import proxy_secrets

STATE_FILE = "upload.json"  # in the capture's folder
PART_BYTES = 16 << 20  # of a multipart upload; S3 accepts 5 MiB to 5 GiB
MAX_PARTS = 10_000
Progress = Callable[[int], None]  # additional bytes; raises Cancelled


class UploadError(Exception):
    """A transfer failed; another try may succeed. The message contains no secrets."""


class LocalDamage(UploadError):
    """A local file does not match the capture's record; trying again is useless."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class RemoteDamage(UploadError):
    """An object is missing or does not match the upload."""


class Cancelled(UploadError):
    """The daemon has cancelled the job."""

    def __init__(self) -> None:
        super().__init__("cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options that a worker gets at its start; new options need a new worker."""

    bytes_per_second: int = 0  # of all uploads together; 0: no limit
    endpoint: str = ""  # of an S3-compatible store; empty: Amazon's, or from the environment
    timeout_s: float = 60.0  # of one request
    folders: tuple[str, ...] = ()  # of this machine, to which captures are or were uploaded


# Credentials: where a service's credentials file goes, and which parts no message may show (`safe_text.redacted`).
_MIN_SECRET_CHARS = 6
_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|KEY|CREDENTIAL|CONNECTION_STRING|SAS", re.IGNORECASE)
# The variable by which the libraries of a scheme find a file with credentials.
FILE_VARIABLES = {
    "s3": "AWS_SHARED_CREDENTIALS_FILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
AZURE_VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"  # Azure's libraries read no file: its content goes here


def credential_variables(scheme: str, path: Path) -> dict[str, str]:
    """Environment of a worker that uses this file. Blocking. Raises OSError."""
    if scheme == "az":
        return {AZURE_VARIABLE: path.read_text().strip()}
    return {FILE_VARIABLES[scheme]: str(path)} if scheme in FILE_VARIABLES else {}


def secrets_of(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Values that must never be seen: of variables that sound like secrets, and in files that those name."""
    found = set(proxy_secrets(environ))
    for name, value in environ.items():
        if _SECRET_NAMES.search(name):
            found.add(value)
        if name in FILE_VARIABLES.values():
            found.update(_in_file(Path(value)))
    return frozenset(value for value in found if len(value) >= _MIN_SECRET_CHARS and not value.startswith("/"))


def _in_file(path: Path) -> Iterable[str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ()
    return re.findall(r"[=:]\s*\"?([^\s\",]{%d,})" % _MIN_SECRET_CHARS, text)
