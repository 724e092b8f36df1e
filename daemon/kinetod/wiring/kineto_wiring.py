"""Starts the door for libkineto's polls, and what records captures through it."""

import contextlib
import os

from kinetod.attach_helper.helper_client import HelperService
from kinetod.attach_helper.helper_folders import HelperTraceFolders
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.config.settings import Config
from kinetod.kineto_files.direct_folders import DirectTraceFolders
from kinetod.kineto_ipc.network_namespaces import NamespaceOpener, OwnRights
from kinetod.kineto_ipc.poll_door import PollDoor


async def start_poll_door(
    config: Config, helper: NamespaceOpener | None, stack: contextlib.AsyncExitStack
) -> PollDoor | None:
    """The door, which is closed with the stack; None if dynolog.ipc is off. helper: the attach helper, if any."""
    if not config.dynolog_ipc:
        return None
    opener = helper or (OwnRights() if os.geteuid() == 0 else None)
    door = PollDoor(config.dynolog_socket_dirs, namespaces=opener if config.dynolog_containers else None)
    stack.push_async_callback(door.stop)
    await door.start()
    return door


def make_recorder(
    door: PollDoor | None, helper: HelperService | None, stack: contextlib.AsyncExitStack
) -> KinetoRecorder | None:
    """What captures by libkineto share, which is stopped with the stack; None if no process polls."""
    if door is None:
        return None
    recorder = KinetoRecorder(door.processes, HelperTraceFolders(helper) if helper else DirectTraceFolders())
    stack.push_async_callback(recorder.stop)
    return recorder
