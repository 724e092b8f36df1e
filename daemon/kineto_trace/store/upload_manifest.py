"""manifest.json: the contents of an uploaded capture. It is written last, so it proves that the upload is complete."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kineto_trace.errors import FileError

FLEET_LABEL = "kineto.fleet"  # label of a capture that joins the captures of several hosts
MANIFEST = "manifest.json"
VERSION = 1
BLOCK_BYTES = 4 << 20  # each has its own checksum, so that any part of a file can be verified alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One uploaded file: its size, its SHA-256, and the SHA-256 of each block of BLOCK_BYTES."""

    size_bytes: int
    sha256: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`capture` is the capture as in the API; `damaged` lists files that were lost before the upload."""

    capture: Mapping[str, Any]
    files: Mapping[str, Stored]  # by path below the capture's folder
    damaged: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Returns the manifest in its stored form."""
        files = {path: asdict(stored) for path, stored in sorted(self.files.items())}
        document = {
            "version": VERSION,
            "block_bytes": BLOCK_BYTES,
            "capture": self.capture,
            "files": files,
            "damaged": dict(self.damaged),
        }
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def from_bytes(data: bytes) -> Manifest:
    """Parses a stored manifest. Raises FileError."""
    try:
        document = json.loads(data)
        if document["version"] != VERSION or document["block_bytes"] != BLOCK_BYTES:
            raise FileError(f"the manifest has version {document['version']}, but this kinetod supports only {VERSION}")
        files = {_checked(path): to_stored(each) for path, each in document["files"].items()}
        damaged = {_checked(path): why for path, why in document["damaged"].items()}
        return Manifest(capture=_checked_capture(document["capture"]), files=files, damaged=damaged)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise FileError(f"the manifest cannot be read: {exc!r}") from exc


def is_below(path: str) -> bool:
    """Returns whether an object path names a file inside a folder, also after it is mapped to this machine."""
    return path.isprintable() and all(part not in ("", ".", "..") for part in path.split("/"))


def _checked(path: str) -> str:
    """Returns the path. Raises FileError if it is not below the capture's folder."""
    if not is_below(path):  # the path comes from anybody who may write to the store
        raise FileError(f"the manifest names {path!r:.80}, which is not a file in the capture's folder")
    return path


def _checked_capture(capture: Any) -> Mapping[str, Any]:
    """Checks the structure that readers rely on. Raises ValueError, AttributeError."""
    targets = capture.get("targets", [])
    parts = [capture.get("spec", {}), *targets, *(target.get("process", {}) for target in targets)]
    if not isinstance(targets, list) or not all(isinstance(part, dict) for part in (capture, *parts)):
        raise ValueError("its capture is not a valid object")
    if not isinstance(capture.get("spec", {}).get("labels", {}), dict):
        raise ValueError("its labels are not a JSON object")
    if not all(type(target.get("process", {}).get("rank", 0)) is int for target in targets):
        raise ValueError("the rank of a target is not a number")
    return dict(capture)


def to_stored(value: Mapping[str, Any]) -> Stored:
    """Parses the entry of one file. Raises ValueError, KeyError, TypeError."""
    stored = Stored(
        size_bytes=int(value["size_bytes"]), sha256=str(value["sha256"]), blocks=tuple(map(str, value["blocks"]))
    )
    if len(stored.blocks) != -(-stored.size_bytes // BLOCK_BYTES):
        raise ValueError(f"a file of {stored.size_bytes} bytes is listed with {len(stored.blocks)} blocks")
    return stored
