"""Starts the door for libkineto's polls."""

import contextlib
import os

from kinetod.config.settings import Config
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
