"""Who may ask the kinetod-writer service, as whom it writes, and below which folders: a file that only root can write.

Theory of operation
    The front end has checked its own settings; it serves a network and can be broken into. So the writer asks nobody
    what is allowed: the file is read again for every request, and one that is missing, wrong or writable by others
    refuses everything. What `dynolog.log_roots` says cannot widen it. Files of root are written only if the file names
    root. Those of this service's own user and of its callers never are: whoever breaks into one part must not get the
    rights of another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec
from kineto_protos.units import parse_size_bytes

from kinetod.base.policy_file import CallersAndUsers, PolicyError, PolicyUsers, read_policy, users_of

DEFAULT_FILE = Path("/etc/kinetod/writer.toml")
DEFAULT_MAX_FILE = "4GiB"


class _File(CallersAndUsers, forbid_unknown_fields=True, kw_only=True):
    roots: list[str] = msgspec.field(default_factory=list)
    max_file: str = DEFAULT_MAX_FILE


@dataclass(frozen=True, slots=True)
class WriterPolicy:
    """What one file allows. max_bytes: of one trace."""

    named: PolicyUsers
    roots: tuple[PurePath, ...]
    max_bytes: int
    path: Path = DEFAULT_FILE

    def refuses_caller(self, uid: int) -> str:
        """Why this user is not served; empty if it is."""
        if uid == 0 or uid in self.named.callers:
            return ""
        return f"uid {uid} may not ask the writer service; `callers` in {self.path} names those who may"

    def refuses_user(self, uid: int) -> str:
        """Why nothing is written as this user; empty if it may be."""
        if uid == self.named.own_uid:
            return f"uid {uid} is the writer service itself"
        if uid and uid in self.named.callers:
            return f"uid {uid} is the caller, as whom nothing is written for others"
        if uid in self.named.denied or uid not in self.named.users:
            return f"nothing is written as uid {uid} (users and denied_users in {self.path})"
        return ""

    def root_of(self, folder: PurePath) -> PurePath | None:
        """The root below which a folder lies by its name, or which it is; None if it lies below none."""
        if not folder.is_absolute() or ".." in folder.parts:
            return None
        return next((root for root in self.roots if folder.is_relative_to(root)), None)


def load(path: Path = DEFAULT_FILE, *, uid_of: Callable[[str], int] | None = None) -> WriterPolicy:
    """Reads the policy file. Raises PolicyError."""
    file = read_policy(path, _File)
    named = users_of(file, path, uid_of)
    for text in file.roots:
        if not text.startswith("/") or ".." in PurePath(text).parts or "\0" in text:
            raise PolicyError(f"{path}: roots: must be absolute paths without .., not {text!r}")
    try:
        max_bytes = parse_size_bytes(file.max_file)
    except ValueError as exc:
        raise PolicyError(f"{path}: max_file: {exc}") from exc
    return WriterPolicy(named, tuple(PurePath(text) for text in file.roots), max_bytes, path)
