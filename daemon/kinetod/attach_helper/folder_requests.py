"""Handles the front end's requests about folders for libkineto's traces, and checks them against the policy.

Making a folder requires the same as an attach: the policy, the credentials that the front end has approved, and both
again afterwards. Later actions in a folder are checked against the policy again, with the facts known about the process
once it has ended; only removal is not, since the folder and libkineto's file in it belong to the helper.
"""

import io
from collections.abc import Callable
from pathlib import Path

import msgspec

from kinetod.attach.attach_types import AttachCode, replaced
from kinetod.attach_helper import messages
from kinetod.attach_helper.allow_list import Policy, owner
from kinetod.attach_helper.kept_folders import KeptFolder, KeptFolders
from kinetod.attach_helper.messages import Denial
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import ProcessKey

Check = Callable[[], Credentials]  # raises Denial, with AttachCode.GONE if the process has ended


async def make(folders: KeptFolders, asked: messages.MakeFolder, check: Check, proc: Path) -> messages.FolderMade:
    """Makes a folder. Raises Denial, AttachError."""
    found = check()
    _same(asked, Credentials.from_dict(msgspec.structs.asdict(asked.approved)), found)
    made = await folders.make(asked, found, owner(asked.target.pid, found, proc))
    try:
        _same(asked, found, check())
    except BaseException:
        if (folder := folders.get(_key(asked), Path(made.path).name)) is not None:
            await folders.remove(folder)
        raise
    return made


async def use(
    folders: KeptFolders, asked: messages.FolderUse, check: Check, policy: Policy, proc: Path
) -> tuple[messages.FolderAnswer, io.FileIO | None]:
    """Looks into a folder, opens the file in it, or removes both. Raises Denial, AttachError."""
    kept = folders.get(_key(asked), asked.name)
    if kept is not None and isinstance(asked, messages.RemoveFolder):
        return await folders.remove(kept), None
    folder = await _allowed(folders, kept, asked, check, policy, proc)
    if folder.file != asked.file:
        raise Denial(AttachCode.NOT_PERMITTED, f"{folder.path} was made for another file than {asked.file}")
    if isinstance(asked, messages.RemoveFolder):
        return await folders.remove(folder), None
    if isinstance(asked, messages.LookIntoFolder):
        return await folders.look(folder), None
    said, descriptor = await folders.open(folder)
    return said, None if descriptor is None else io.FileIO(descriptor)


async def _allowed(
    folders: KeptFolders, kept: KeptFolder | None, asked: messages.FolderUse, check: Check, policy: Policy, proc: Path
) -> KeptFolder:
    try:
        found = check()
    except Denial as exc:
        if kept is None or exc.code != AttachCode.GONE:
            raise
        if why := policy.refuses_owner(kept.owner, administrator=True):  # its creator has been checked
            reason = f"process {kept.key.pid}: the attach helper's policy forbids it: {why}"
            raise Denial(AttachCode.NOT_PERMITTED, reason) from exc
        return kept
    if kept is not None:
        _same(asked, kept.credentials, found)
        return kept
    return await folders.reopen(asked, found, owner(asked.target.pid, found, proc))


def _key(asked: messages.MakeFolder | messages.FolderUse) -> ProcessKey:
    return ProcessKey(asked.target.pid, asked.target.start_time_ns)


def _same(asked: messages.MakeFolder | messages.FolderUse, before: Credentials, found: Credentials) -> None:
    """Raises AttachError if the process has been replaced."""
    if difference := before.difference(found):
        raise replaced(asked.target.pid, difference)
