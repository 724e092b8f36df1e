"""Starts the door for libkineto's polls, and what records captures through it."""

import contextlib

from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
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


def make_recorder(door: PollDoor | None, stack: contextlib.AsyncExitStack) -> KinetoRecorder | None:
    """What captures by libkineto share, which is stopped with the stack; None if no process polls."""
    if door is None:
        return None
    recorder = KinetoRecorder(door.processes)
    stack.push_async_callback(recorder.stop)
    return recorder
