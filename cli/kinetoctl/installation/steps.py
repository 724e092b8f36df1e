"""The steps that an installation consists of; each knows whether it still has to be done.

Theory of operation
    A step inspects the host (or an image below another root) and says what it would do, or nothing if that is done. So
    an installation can be repeated and shown in advance, and the next run completes an interrupted one. Files are
    replaced atomically (written beside, then renamed). Paths are those of the installed host; only `Host` knows that
    they may be below another root.
"""

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kinetoctl.errors import NotInstalled


@dataclass(slots=True)
class Host:
    """The host itself, or an image. changed: whether a step has changed a file so far."""

    root: Path = Path("/")
    changed: bool = field(default=False)

    @property
    def is_image(self) -> bool:
        """Whether it is an image rather than the host that this runs on."""
        return self.root != Path("/")

    @property
    def runs_systemd(self) -> bool:
        """Whether units can be started and stopped."""
        return not self.is_image and Path("/run/systemd/system").is_dir()

    def at(self, path: Path) -> Path:
        """The local path of a path of the host. Raises NotInstalled if links in an image lead out of it."""
        here = self.root / path.relative_to("/")
        if self.is_image and not here.parent.resolve().is_relative_to(self.root.resolve()):
            raise NotInstalled(f"{path} is not in the image: a link leads to {here.parent.resolve()}")
        return here

    def entries(self, file: str) -> list[list[str]]:
        """The lines of /etc/passwd or /etc/group that have a name and a number, split into fields."""
        with contextlib.suppress(OSError):
            lines = self.at(Path("/etc") / file).read_text(errors="replace").splitlines()
            return [fields for line in lines if len(fields := line.split(":")) > 2 and fields[2].isdecimal()]
        return []

    def number(self, file: str, name: str) -> int | None:
        """The number of a user (`passwd`) or group (`group`), or None if there is none of that name."""
        found = next((int(fields[2]) for fields in self.entries(file) if fields[0] == name), None)
        return 0 if found is None and name == "root" else found

    def run(self, *command: str) -> None:
        """Runs a command. Raises NotInstalled if it fails."""
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
        except OSError as exc:
            raise NotInstalled(f"{command[0]} cannot be run: {exc.strerror}") from exc
        if done.returncode != 0:
            why = (done.stderr or done.stdout).strip()
            raise NotInstalled(f"`{' '.join(command)}` failed with exit status {done.returncode}: {why[-2000:]}")


FIRST_PERSON = 1000  # uids of people begin here, by the usual login.defs
_NO_SHELLS = ("nologin", "false")


def is_another_ones(entry: Sequence[str]) -> bool:
    """Whether a line of passwd belongs to root or to a person who can log in."""
    uid = int(entry[2])
    return uid == 0 or (uid >= FIRST_PERSON and Path(entry[-1]).name not in _NO_SHELLS)


class Step(Protocol):
    """One step."""

    def missing(self, host: Host) -> str:
        """What the step would do, for people; empty if it is done."""

    def do(self, host: Host) -> None:
        """Carries the step out. Raises OSError, NotInstalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """The owner of a file, by name, and its mode."""

    user: str = "root"
    group: str = "root"
    mode: int = 0o644

    def numbers(self, host: Host) -> tuple[int, int] | None:
        """The uid and gid, or None if one of them does not exist."""
        uid, gid = host.number("passwd", self.user), host.number("group", self.group)
        return None if uid is None or gid is None else (uid, gid)

    def differs(self, host: Host, status: os.stat_result) -> bool:
        """Whether a file has another owner or another mode."""
        return (status.st_uid, status.st_gid) != self.numbers(host) or stat.S_IMODE(status.st_mode) != self.mode

    def apply(self, host: Host, path: Path) -> None:
        """Sets owner and mode. Raises OSError, NotInstalled."""
        numbers = self.numbers(host)
        if numbers is None:
            raise NotInstalled(
                f"{path} should belong to {self.user}:{self.group}, but that user or group does not exist"
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:  # both apply to the same file, whatever is put in its place meanwhile
            os.fchown(descriptor, *numbers)
            os.fchmod(descriptor, self.mode)
        finally:
            os.close(descriptor)

    def __str__(self) -> str:
        return f"{self.user}:{self.group} {self.mode:04o}"


@dataclass(frozen=True, slots=True)
class Write:
    """A file with this content. keep: an existing file is not changed (configuration)."""

    path: Path
    content: bytes
    owned: Owned = Owned()
    keep: bool = False

    def missing(self, host: Host) -> str:
        """See Step."""
        path = host.at(self.path)
        try:
            status = path.lstat()
        except OSError:
            return f"write {self.path} ({self.owned})"
        other = not stat.S_ISREG(status.st_mode)
        if stat.S_ISDIR(status.st_mode) if self.keep else other or path.read_bytes() != self.content:
            return f"replace {self.path} ({self.owned})"
        if stat.S_ISREG(status.st_mode) and self.owned.differs(host, status):
            return f"give {self.path} to {self.owned}"
        return ""

    def do(self, host: Host) -> None:
        """See Step."""
        path = host.at(self.path)
        if self.keep and path.is_file():
            self.owned.apply(host, path)
            return
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.content)
                file.flush()
                os.fsync(file.fileno())
            self.owned.apply(host, beside)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        host.changed = True


@dataclass(frozen=True, slots=True)
class OwnedFolder:
    """A folder, whose content is not touched."""

    path: Path
    owned: Owned

    def missing(self, host: Host) -> str:
        """See Step."""
        path = host.at(self.path)
        try:
            status = path.lstat() if host.is_image else path.stat()
        except OSError:
            return f"make {self.path}/ ({self.owned})"
        return f"give {self.path}/ to {self.owned}" if self.owned.differs(host, status) else ""

    def do(self, host: Host) -> None:
        """See Step."""
        path = host.at(self.path)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.owned.apply(host, path.resolve() if path.is_symlink() and not host.is_image else path)


@dataclass(frozen=True, slots=True)
class Users:
    """The users that a sysusers.d file names."""

    names: tuple[str, ...]
    file: Path

    def missing(self, host: Host) -> str:
        """See Step."""
        lacking = [
            name for name in self.names if host.number("passwd", name) is None or host.number("group", name) is None
        ]
        return f"make the system user{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}" if lacking else ""

    def do(self, host: Host) -> None:
        """Uses systemd-sysusers or, without it, useradd."""
        root = [f"--root={host.root}"] if host.is_image else []
        if shutil.which("systemd-sysusers"):
            host.run("systemd-sysusers", *root, self.file.name)  # systemd-sysusers looks in the folders of the root
            return
        for name in self.names:
            if host.number("passwd", name) is None:
                inside = ["--root", str(host.root)] if host.is_image else []
                shell = "/usr/sbin/nologin"
                host.run("useradd", *inside, "--system", "--user-group", "--no-create-home", "--shell", shell, name)


@dataclass(frozen=True, slots=True)
class NoUsers:
    """Removes system users. A person's account of that name is kept: kinetod was never installed with it."""

    names: tuple[str, ...]

    def _found(self, host: Host) -> list[str]:
        there = {entry[0]: entry for entry in host.entries("passwd")}
        return [name for name in self.names if name in there and not is_another_ones(there[name])]

    def missing(self, host: Host) -> str:
        """See Step."""
        found = self._found(host)
        return f"remove the system user{'s' if len(found) > 1 else ''} {', '.join(found)}" if found else ""

    def do(self, host: Host) -> None:
        """See Step."""
        inside = ["--root", str(host.root)] if host.is_image else []
        for name in self._found(host):
            host.run("userdel", *inside, name)
        for name in self.names:
            if host.number("passwd", name) is None and host.number("group", name) is not None:
                host.run("groupdel", *inside, name)


@dataclass(frozen=True, slots=True)
class Remove:
    """Removes a file, or a folder with everything in it. The target of a link is kept."""

    path: Path

    def missing(self, host: Host) -> str:
        """See Step."""
        path = host.at(self.path)
        if not os.path.lexists(path):
            return ""
        return f"remove {self.path}{'/ with everything in it' if path.is_dir() and not path.is_symlink() else ''}"

    def do(self, host: Host) -> None:
        """See Step."""
        path = host.at(self.path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        host.changed = True


@dataclass(frozen=True, slots=True)
class EnabledUnits:
    """Units that are started at boot, or no longer."""

    units: tuple[str, ...]
    wanted: bool = True

    def missing(self, host: Host) -> str:
        """See Step."""
        wrong = [name for name in self.units if self._is_wanted(name, host) != self.wanted]
        return f"{'enable' if self.wanted else 'disable'} {', '.join(wrong)}" if wrong else ""

    def _is_wanted(self, name: str, host: Host) -> bool:
        folders = host.at(Path("/etc/systemd/system")).glob("*.wants")
        return any(
            os.path.lexists(folder / name) for folder in folders
        )  # in an image, the target of the link is missing

    def do(self, host: Host) -> None:
        """See Step."""
        if not shutil.which("systemctl"):
            raise NotInstalled("systemctl is missing; kinetod's units need systemd")
        root = [f"--root={host.root}"] if host.is_image else []
        host.run("systemctl", *root, "--quiet", "enable" if self.wanted else "disable", *self.units)


@dataclass(frozen=True, slots=True)
class Control:
    """A command for the running systemd. if_changed: only if another step has changed a file."""

    command: tuple[str, ...]
    unless_active: str = ""  # not if this unit is already running
    if_active: str = ""
    if_changed: bool = False
    says: str = ""

    def missing(self, host: Host) -> str:
        """See Step."""
        if not host.runs_systemd or (self.if_changed and not host.changed):
            return ""
        if self.unless_active and not host.changed and _is_active(self.unless_active):
            return ""
        if self.if_active and not _is_active(self.if_active):
            return ""
        return self.says or f"systemctl {' '.join(self.command)}"

    def do(self, host: Host) -> None:
        """See Step."""
        host.run("systemctl", *self.command)


def _is_active(unit: str) -> bool:
    with contextlib.suppress(OSError):
        done = subprocess.run(["systemctl", "--quiet", "is-active", unit], check=False, capture_output=True)
        return done.returncode == 0
    return False


def carry_out(steps: Sequence[Step], host: Host, *, dry_run: bool) -> list[str]:
    """Carries the steps out and returns what was done, or, with dry_run, would be done. Raises NotInstalled."""
    done = []
    for step in steps:
        if said := step.missing(host):
            if not dry_run:
                try:
                    step.do(host)
                except OSError as exc:
                    raise NotInstalled(f"could not {said}: {exc}") from exc
            elif isinstance(step, (Write, Remove)):
                host.changed = True  # so that the steps that follow from it are shown too
            done.append(said)
    return done
