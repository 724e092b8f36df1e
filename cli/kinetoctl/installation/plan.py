"""The steps of installing kinetod on a host, and of uninstalling it.

Theory of operation
    Both ways of installing have the same result: `kinetoctl host install` does all of it; a package contains the files
    (`FILES`, written when it is built), and its scripts do the rest (`SETUP`). Only the folders differ: units from an
    administrator are in /etc, those of a package in /usr/lib.

    The programs themselves are not installed here: the units name their folder. Only root may be able to write to that
    folder, everything above it and the interpreter, because the attach helper has rights over every process.
"""

import os
import re
import stat
import sys
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path

from kinetoctl.errors import NotInstalled, UsageProblem
from kinetoctl.installation.conflicts import check_file, check_folder, check_users
from kinetoctl.installation.steps import (
    Control,
    EnabledUnits,
    Host,
    NoUsers,
    Owned,
    OwnedFolder,
    Remove,
    Step,
    Users,
    Write,
)

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
_CHECKOUT = Path(__file__).parents[3] / "deploy"


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
    raise NotInstalled(f"this kinetoctl lacks its file {name}; install kinetoctl from its wheel or package")


def unit(name: str, programs: Path) -> bytes:
    """A unit for programs in that folder. Raises UsageProblem for a folder that a unit cannot name."""
    text = data(f"systemd/{name}").decode()
    if re.search(r"[\s%\"'\\$]", str(programs)):
        raise UsageProblem(f"--programs: a unit cannot name {str(programs)!r}, which has blanks or special characters")
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
            raise NotInstalled(
                f"there is no program {programs / name}; use --programs to say where kinetod is installed"
            )
    if host.is_image:
        return
    for name in (*PROGRAMS, INTERPRETER):
        path = (programs / name).resolve()
        if str(path).startswith(tuple(f"{home}/" for home in _HOMES)):
            raise NotInstalled(
                f"{path} is in a home folder, which the service cannot see; install kinetod in /opt/kinetod, with an "
                "interpreter of the system"
            )
        for part in (path, *path.parents):
            status = part.stat()
            if status.st_uid != 0 or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
                raise NotInstalled(
                    f"users other than root can write to {part}, and the attach helper, which has rights "
                    f"over every process, runs {path}; install kinetod in a folder that only root can write to, "
                    "such as /opt/kinetod"
                )
