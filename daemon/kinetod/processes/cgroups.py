"""The control groups that a process is in, as folders that we can read.

Theory of operation
    /proc/PID/cgroup names a group in each hierarchy, by its path below the root of our own control group namespace;
    /proc/self/mountinfo says where a hierarchy, or a part of it, is mounted for us. A group outside of what is mounted
    here (we are in a container with a namespace of its own) has no folder, so nothing is known about it. A limit
    applies to a group and all below it, so the whole chain up to the root counts.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kinetod.processes.identity import PROC, lines

V1, V2 = 1, 2
_OCTAL = re.compile(r"\\([0-7]{3})")  # mountinfo writes a space as \040


@dataclass(frozen=True, slots=True)
class Group:
    """One control group. path: below the root of the hierarchy, for people."""

    version: int
    folder: Path
    path: str

    def text(self, name: str) -> str:
        """The content of one of its files; empty if it has none (the root of a hierarchy has few)."""
        with contextlib.suppress(OSError):
            return (self.folder / name).read_text(errors="replace").strip()
        return ""

    def number(self, name: str) -> int | None:
        """The number in one of its files; None for "max", or if there is no such file."""
        text = self.text(name)
        return int(text) if text.isdecimal() else None

    def numbers(self, name: str) -> dict[str, int]:
        """A file with a word and a number in each line."""
        pairs = (line.split() for line in self.text(name).splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    controllers: frozenset[str]  # of version 1
    root: PurePosixPath  # the part of the hierarchy that is mounted
    folder: Path


def groups(pid: int, controller: str, proc: Path = PROC) -> list[Group]:
    """The group of this process for a controller, then those above it. Empty if they cannot be seen."""
    return next(_chains(pid, controller, proc), [])


def _chains(pid: int, controller: str, proc: Path) -> Iterator[list[Group]]:
    """The chains of version 1, if the controller has a hierarchy of its own, then those of version 2."""
    mounts = list(_mounts(proc))
    for version, path in _paths(pid, controller, proc):
        for mount in mounts:
            if mount.version == version and (version == V2 or controller in mount.controllers):
                found = list(_chain(mount, PurePosixPath(path)))
                if found:
                    yield found
                    break


def _paths(pid: int, controller: str, proc: Path) -> list[tuple[int, str]]:
    with contextlib.suppress(OSError):
        found = list[tuple[int, str]]()
        for line in lines((proc / str(pid) / "cgroup").read_bytes()):
            number, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            if controller in names.split(","):
                found.insert(0, (V1, path))
            elif number == "0" and not names:
                found.append((V2, path))
        return found
    return []


def _mounts(proc: Path) -> Iterator[_Mount]:
    with contextlib.suppress(OSError):
        for line in lines((proc / "self/mountinfo").read_bytes()):
            fields, _, kind = line.partition(" - ")
            words, types = fields.split(" "), kind.split(" ")
            if len(words) < 5 or types[0] not in ("cgroup", "cgroup2"):
                continue
            version = V2 if types[0] == "cgroup2" else V1
            root, folder = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), word) for word in words[3:5])
            yield _Mount(version, frozenset(types[-1].split(",")), PurePosixPath(root), Path(folder))


def _chain(mount: _Mount, path: PurePosixPath) -> Iterator[Group]:
    if ".." in path.parts or ".." in mount.root.parts or not path.is_relative_to(mount.root):
        return
    inner = path.relative_to(mount.root)
    if not (mount.folder / inner).is_dir():
        return
    for each in (inner, *inner.parents):
        yield Group(mount.version, mount.folder / each, str(mount.root / each))


def frozen_by(pid: int, proc: Path = PROC) -> str:
    """The file by which a control group freezes a process; empty: it is not visibly frozen."""
    return next(filter(None, map(_freezes, _chains(pid, "freezer", proc))), "")


def _freezes(chain: list[Group]) -> str:
    if chain[0].version == V2:
        frozen, file, switch = chain[0].numbers("cgroup.events").get("frozen") == 1, "cgroup.freeze", "cgroup.freeze"
    else:
        frozen = chain[0].text("freezer.state") in ("FROZEN", "FREEZING")
        file, switch = "freezer.state", "freezer.self_freezing"
    if not frozen:
        return ""
    return str(next((group for group in chain if group.number(switch) == 1), chain[0]).folder / file)
