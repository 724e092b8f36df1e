"""Installs kinetod on a host (users, units, configuration, folders) and removes it again: the plan, and its steps.

Theory of operation
    Both ways of installing have the same result: `kinetoctl host install` does all of it; a package contains the files
    (`FILES`, written when it is built), and its scripts do the rest (`SETUP`). Only the folders differ: units from an
    administrator are in /etc, those of a package in /usr/lib.

    The programs themselves are not installed here: the units name their folder. Only root may be able to write to that
    folder, everything above it and the interpreter, because the attach helper has rights over every process.
"""

import contextlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from pathlib import Path
from typing import Protocol

from kinetoctl.errors import NotInstalled, UsageProblem

USER, HELPER_USER, WRITER_USER, COUNTERS_USER = "kineto", "kineto-attach", "kineto-writer", "kineto-counters"
USERS = (USER, HELPER_USER, WRITER_USER, COUNTERS_USER)
SERVICE, HELPER, HELPER_SOCKET = "kinetod.service", "kinetod-attach.service", "kinetod-attach.socket"
COUNTERS, COUNTERS_SOCKET = "kinetod-counters.service", "kinetod-counters.socket"
# Laid down, and started by whoever has configured them.
WEB, WRITER, WRITER_SOCKET = "kinetod-web.service", "kinetod-writer.service", "kinetod-writer.socket"
UNITS = (SERVICE, HELPER_SOCKET, HELPER, COUNTERS_SOCKET, COUNTERS, WRITER_SOCKET, WRITER, WEB)
ENABLED = (SERVICE, HELPER_SOCKET, COUNTERS_SOCKET)
PROGRAMS = ("kinetod", "kinetod-attach", "kinetod-counters", "kinetod-writer")
INTERPRETER = "python3"  # beside them
POLICIES = ("attach.toml", "writer.toml")
CONFIGURATION = ("config.toml", *POLICIES)
CONFIG_DIR, STATE_DIR, CREDENTIALS_DIR = Path("/etc/kinetod"), Path("/var/lib/kineto"), Path("/etc/credstore")
RUN_DIRS = (
    Path("/run/kineto"),
    Path("/run/kinetod-attach"),
    Path("/run/kinetod-counters"),
    Path("/run/kinetod-writer"),
)
DEFAULT_PROGRAMS = Path("/opt/kinetod/bin")
_HOMES = ("/home", "/root", "/run/user")
_DATA = Path(__file__).parent / "data"
_CHECKOUT = Path(__file__).parents[2] / "deploy"


# The steps that an installation consists of; each knows whether it still has to be done.
#
# A step inspects the host (or an image below another root) and says what it would do, or nothing
# if that is done. So an installation can be repeated and shown in advance, and the next run completes an interrupted
# one. Files are replaced atomically (written beside, then renamed). Paths are those of the installed host; only
# `Host` knows that they may be below another root.
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
            raise NotInstalled(f"{path} is outside the image: a link leads to {here.parent.resolve()}")
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
        try:  # both apply to the same file, whatever is put in its place in between
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
            return f"set owner and mode of {self.path} to {self.owned}"
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
            return f"create {self.path}/ ({self.owned})"
        return f"set owner and mode of {self.path}/ to {self.owned}" if self.owned.differs(host, status) else ""

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
        return f"create the system user{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}" if lacking else ""

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
        return f"remove {self.path}{'/ and everything in it' if path.is_dir() and not path.is_symlink() else ''}"

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


class InstallPart(Flag):
    """The parts of an installation."""

    FILES = auto()  # units, and the lists of users and folders
    SETUP = auto()  # users, folders, configuration, starting
    ALL = FILES | SETUP


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The paths of the files."""

    units: Path
    sysusers: Path
    tmpfiles: Path


ADMINISTRATORS = FileLayout(
    Path("/etc/systemd/system"), Path("/etc/sysusers.d/kinetod.conf"), Path("/etc/tmpfiles.d/kinetod.conf")
)
PACKAGES = FileLayout(
    Path("/usr/lib/systemd/system"),
    Path("/usr/lib/sysusers.d/kinetod.conf"),
    Path("/usr/lib/tmpfiles.d/kinetod.conf"),
)


def data(name: str) -> bytes:
    """A file that comes with kinetoctl, from the wheel or a checkout. Raises NotInstalled."""
    for folder in (_DATA, _CHECKOUT):
        if (path := folder / name).is_file():
            return path.read_bytes()
    raise NotInstalled(f"kinetoctl's file {name} is missing; reinstall kinetoctl from its wheel or package")


def unit(name: str, programs: Path) -> bytes:
    """A unit for programs in that folder. Raises UsageProblem for a folder that a unit cannot name."""
    text = data(f"systemd/{name}").decode()
    if re.search(r"[\s%\"'\\$]", str(programs)):
        raise UsageProblem(
            f"--programs: {str(programs)!r} contains spaces or special characters, which a systemd unit cannot use"
        )
    text = text.replace(f"{DEFAULT_PROGRAMS}/", f"{programs}/")
    return text.replace(f"file:{DEFAULT_PROGRAMS.parent}/share", f"file:{programs.parent}/share").encode()


def install(layout: FileLayout, parts: InstallPart, *, programs: Path, start: bool) -> list[Step]:
    """The steps of an installation. Raises NotInstalled, UsageProblem."""
    steps: list[Step] = []
    if InstallPart.FILES in parts:
        steps += [Write(layout.units / name, unit(name, programs)) for name in UNITS]
        steps += [
            Write(layout.sysusers, data("systemd/sysusers.d.conf")),
            Write(layout.tmpfiles, data("systemd/tmpfiles.d.conf")),
        ]
    if InstallPart.SETUP in parts:
        steps += [
            Users(USERS, layout.sysusers),
            OwnedFolder(CONFIG_DIR, Owned(mode=0o755)),
            OwnedFolder(CREDENTIALS_DIR, Owned(mode=0o700)),
            OwnedFolder(STATE_DIR, Owned(user=USER, group=USER, mode=0o700)),
            Write(CONFIG_DIR / "config.toml", data("config/config.toml"), Owned(group=USER, mode=0o640), keep=True),
            *(Write(CONFIG_DIR / name, data(f"config/{name}"), keep=True) for name in POLICIES),
            Control(("daemon-reload",), if_changed=True),
            EnabledUnits(ENABLED),
        ]
        if start:
            steps += _started(always=InstallPart.FILES not in parts)
    return steps


def _started(*, always: bool) -> list[Step]:
    """The steps that start the service. always: even if no file has changed, because a package has new programs."""
    sockets = {HELPER_SOCKET: HELPER, COUNTERS_SOCKET: COUNTERS}
    return [
        *(Control(("start", socket), unless_active="" if always else socket) for socket in sockets),
        # The next requests start the new ones.
        *(Control(("stop", each), if_active=each, if_changed=not always) for each in (*sockets.values(), WRITER)),
        Control(("restart", SERVICE), unless_active="" if always else SERVICE, says=f"start {SERVICE}"),
    ]


def uninstall(layout: FileLayout, parts: InstallPart, *, purge: bool) -> list[Step]:
    """The steps of an uninstallation. Without purge, captures, configuration and users are kept."""
    steps: list[Step] = []
    if InstallPart.SETUP in parts:
        steps += [
            *(Control(("stop", name), if_active=name) for name in UNITS),
            EnabledUnits((*ENABLED, WRITER_SOCKET), wanted=False),
        ]
    if InstallPart.FILES in parts:
        steps += [Remove(layout.units / name) for name in UNITS]
        steps += [Remove(layout.sysusers), Remove(layout.tmpfiles)]
    if InstallPart.SETUP in parts:
        steps += [*(Remove(path) for path in RUN_DIRS), Control(("daemon-reload",), if_changed=True)]
        if purge:
            steps += [Remove(STATE_DIR), Remove(CONFIG_DIR), NoUsers(USERS)]
    return steps


def kept(host: Host) -> list[Path]:
    """The folders that an uninstallation without purge keeps."""
    return [path for path in (STATE_DIR, CONFIG_DIR) if host.at(path).exists()]


def of_a_package(host: Host) -> bool:
    """Whether a package has installed kinetod already."""
    return host.at(PACKAGES.units / SERVICE).exists()


def own_programs() -> Path:
    """The folder of the programs that came with this kinetoctl."""
    return Path(sys.prefix) / "bin"


def check_leftovers(host: Host) -> None:
    """Raises NotInstalled if an installation would take over something that belongs to others."""
    check_users(host, USERS)
    check_folder(host, CONFIG_DIR)
    check_folder(host, CREDENTIALS_DIR)
    check_folder(host, STATE_DIR, USER)
    for name in CONFIGURATION:
        check_file(host, CONFIG_DIR / name)


def check_programs(host: Host, programs: Path) -> None:
    """Raises NotInstalled if the programs are missing, or if users other than root could replace them."""
    for name in (*PROGRAMS, *(() if host.is_image else (INTERPRETER,))):
        path = host.at(programs / name)
        if not path.is_file() or not os.access(path, os.X_OK):
            raise NotInstalled(f"program {programs / name} not found; use --programs to say where kinetod is installed")
    if host.is_image:
        return
    for name in (*PROGRAMS, INTERPRETER):
        path = (programs / name).resolve()
        if str(path).startswith(tuple(f"{home}/" for home in _HOMES)):
            raise NotInstalled(
                f"{path} is in a home folder, which the service cannot see; install kinetod in /opt/kinetod, with "
                "the system's Python"
            )
        for part in (path, *path.parents):
            status = part.stat()
            if status.st_uid != 0 or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
                raise NotInstalled(
                    f"users other than root can write to {part}, but the attach helper runs {path} with rights over "
                    "every process; install kinetod in a folder that only root can write to, such as /opt/kinetod"
                )


# Checks for existing files, folders and accounts that an installation must not take over.
#
# An installation gives folders and files to root and to kinetod's users. If others had made them, kinetod would trust
# them: a policy of the attach helper, a store with folders that they still have open, an account that a person logs in
# to. These are refused. What belongs to no user of this host is left over from an earlier installation, and is
# repaired.
def check_users(host: Host, names: tuple[str, ...]) -> None:
    """Raises NotInstalled if one of the users is a person's account or root, or shares its uid with another."""
    entries = host.entries("passwd")
    for entry in entries:
        others = [other[0] for other in entries if other[2] == entry[2] and other[0] != entry[0]]
        if entry[0] in names and (others or is_another_ones(entry)):
            whose = f"shared with {others[0]}" if others else "which belongs to root or a person"
            raise NotInstalled(
                f"a user {entry[0]} already exists, with uid {entry[2]}, {whose}; kinetod needs this user for itself: "
                "rename or remove that account"
            )


def check_folder(host: Host, path: Path, *owners: str) -> None:
    """Raises NotInstalled if the folder, or a link that leads to it, belongs to a user other than these and root."""
    here = host.at(path)
    allowed = {0, *(number for name in owners if (number := host.number("passwd", name)) is not None)}
    for status in _statuses(host, here):
        if status.st_uid not in allowed and (name := _name(host, status.st_uid)):
            raise NotInstalled(
                f"{path} belongs to {name} (uid {status.st_uid}), who could have put anything there; check "
                "its contents, then remove it or change its owner to root"
            )


def check_file(host: Host, path: Path) -> None:
    """Raises NotInstalled if users other than root have written, or could have written, a file that will be kept."""
    for status in _statuses(host, host.at(path)):
        others = status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode)
        if status.st_uid != 0 or others:
            why = "can be written by users other than root" if others else f"belongs to uid {status.st_uid}"
            raise NotInstalled(
                f"{path} {why}, and kinetod would trust it; check its contents, then `chown root {path}` and "
                f"`chmod go-w {path}`, or remove it"
            )


def _statuses(host: Host, path: Path) -> list[os.stat_result]:
    """The status of a path and, unless in an image, of the target of a link."""
    try:
        found = [path.lstat()]
        if stat.S_ISLNK(found[0].st_mode) and not host.is_image:
            found.append(path.stat())
    except FileNotFoundError:
        return []
    return found


def _name(host: Host, uid: int) -> str:
    if host.is_image:
        return next((entry[0] for entry in host.entries("passwd") if entry[2] == str(uid)), "")
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
