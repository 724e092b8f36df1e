"""Starts the door for libkineto's polls."""

import contextlib

from kinetod.config.settings import Config
from kinetod.kineto_ipc.poll_door import PollDoor


async def start_poll_door(config: Config, stack: contextlib.AsyncExitStack) -> PollDoor | None:
    """The door, which is closed with the stack; None if dynolog.ipc is off."""
    if not config.dynolog_ipc:
        return None
    door = PollDoor(config.dynolog_socket_dirs)
    stack.push_async_callback(door.stop)
    await door.start()
    return door
