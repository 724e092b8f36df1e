"""Checks for existing files, folders and accounts that an installation must not take over.

An installation gives folders and files to root and to kinetod's users. If others had made them, kinetod would trust
them: a policy of the attach helper, a store with folders that they still have open, an account that a person logs in
to. These are refused. What belongs to no user of this host is left over from an earlier installation, and is repaired.
"""

import os
import pwd
import stat
from pathlib import Path

from kinetoctl.errors import NotInstalled
from kinetoctl.installation.steps import Host, is_another_ones


def check_users(host: Host, names: tuple[str, ...]) -> None:
    """Raises NotInstalled if one of the users is a person's account or root, or shares its uid with another."""
    entries = host.entries("passwd")
    for entry in entries:
        others = [other[0] for other in entries if other[2] == entry[2] and other[0] != entry[0]]
        if entry[0] in names and (others or is_another_ones(entry)):
            whose = f"the same as {others[0]}'s" if others else "root's or a person's"
            raise NotInstalled(
                f"a user {entry[0]} exists already, with uid {entry[2]}, {whose}; kinetod needs this user for itself: "
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
                "its content, then remove it or change its owner to root"
            )


def check_file(host: Host, path: Path) -> None:
    """Raises NotInstalled if users other than root have written, or could have written, a file that will be kept."""
    for status in _statuses(host, host.at(path)):
        others = status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode)
        if status.st_uid != 0 or others:
            why = "can be written by users other than root" if others else f"belongs to uid {status.st_uid}"
            raise NotInstalled(
                f"{path} {why}, and kinetod would obey it; check its content, then `chown root {path}` and "
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
