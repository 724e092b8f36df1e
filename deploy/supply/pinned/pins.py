"""Reads a lock: the requirements file with hashes that `make lock` writes."""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1]
RUNTIME = FOLDER / "requirements.txt"  # kinetod's dependencies with all extras that are deployed
BUILD = FOLDER / "build.txt"  # the tools of build.in

PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?:\s*;\s*(?P<marker>[^\\]+?))?\s*\\?$")
HASH = re.compile(r"^\s+--hash=sha256:(?P<digest>[0-9a-f]{64})(?: \\)?$")


class LockError(Exception):
    """A lock has a line that is neither a pin nor a hash: nothing can be said about what it installs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One package at one version, and the SHA-256 of every file that may be installed as it."""

    name: str
    version: str
    marker: str
    digests: frozenset[str]


def normal(name: str) -> str:
    """The name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(lock: Path) -> dict[str, Pin]:
    """The pins of a lock by their normal names. Raises LockError for anything else that stands there."""
    found: dict[str, Pin] = {}
    name = ""
    for number, line in enumerate(lock.read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        digest = HASH.match(line)
        if digest and name:
            pin = found[name]
            digests = pin.digests | {digest["digest"]}
            found[name] = Pin(name=name, version=pin.version, marker=pin.marker, digests=digests)
            continue
        pinned = PIN.match(line)
        if pinned is None:
            raise LockError(f"{lock}:{number}: neither a pinned package nor a SHA-256: {line!r}; renew it: make lock")
        name = normal(pinned["name"])
        if name in found:
            raise LockError(f"{lock}:{number}: {name} is pinned twice; renew it: make lock")
        marker = pinned["marker"] or ""
        found[name] = Pin(name=name, version=pinned["version"], marker=marker, digests=frozenset())
    return found
