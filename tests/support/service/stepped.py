"""kinetod, its helper or the helper service, stopped at every step of an attach until the test lets it go on.

    python stepped.py MODULE ARGUMENT...        as `python -m MODULE ARGUMENT...`, with $STEPS the socket of the test

Each step is a function of the daemon, before or after which the test is told the step's name and waited for. Nothing in
the daemon itself knows of it. A coroutine waits by itself: the rest of its process goes on.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import socket
import sys
from typing import Any

BEFORE, AFTER = "before", "after"
# name -> module, function, which side
DAEMON_STEPS = {
    "looked": ("kinetod.captures.request.target_resolution", "_with_agents", BEFORE),
    "asked": ("kinetod.agents.attacher", "Attacher._attach", BEFORE),
    "channel": ("kinetod.agents.attacher", "Attacher._connect", BEFORE),
    "adopted": ("kinetod.agents.attacher", "Attacher._connect", AFTER),
    "introduced": ("kinetod.captures.request.target_resolution", "_with_agents", AFTER),
    "decided": ("kinetod.captures.request.target_resolution", "resolve", AFTER),
    "made": ("kinetod.captures.live_capture", "TargetRuns.new", AFTER),
    "collecting": ("kinetod.captures.target.target_run", "TargetRun._collect", BEFORE),
    "collected": ("kinetod.captures.target.target_run", "TargetRun._collect", AFTER),
    "storing": ("kinetod.captures.target.target_run", "TargetRun._store", BEFORE),
}
SERVICE_STEPS = {
    "service-asked": ("kinetod.attach_helper.helper_server", "AttachService.attach", BEFORE),
    "service-checked": ("kinetod.attach_helper.attach_pool", "AttachHelpers.attach", BEFORE),
    "service-attached": ("kinetod.attach_helper.attach_pool", "AttachHelpers.attach", AFTER),
}
HELPER_STEPS = {
    "request": ("kinetod.attach.attach_types", "AttachRequest.check_process", BEFORE),
    "checked": ("kinetod.attach.attach_types", "AttachRequest.check_process", AFTER),
    "memory": ("kinetod.attach.inspect.target_memory", "TargetMemory.__init__", BEFORE),
    "image": ("kinetod.attach.inspect.target_image", "TargetImage.__init__", AFTER),
    "suitable": ("kinetod.attach.policy.preconditions", "check", AFTER),
    "placed": ("kinetod.attach.inject.injection", "_HandOver._place", AFTER),
    "work": ("kinetod.attach.inject.injection", "_HandOver._work", AFTER),
    "seizing": ("kinetod.attach.inject.ptrace", "StoppedThread.__enter__", BEFORE),
    "stopped": ("kinetod.attach.inject.ptrace", "StoppedThread.__enter__", AFTER),
    "verified": ("kinetod.attach.inject.ptrace", "StoppedThread.check", AFTER),
    "entered": ("kinetod.attach.inject.injection", "_HandOver._redirect", AFTER),
    "handed": ("kinetod.attach.inject.injection", "_HandOver.run", AFTER),
    "found": ("kinetod.attach.channel.private_channel", "_find", AFTER),
    "taken": ("kinetod.attach.channel.private_channel", "_checked", AFTER),
    "sent": ("kinetod.attach.channel.payload", "send", AFTER),
}
IN_THE_STOP = ("stopped", "verified", "entered")
STEPS_OF = {
    "kinetod": DAEMON_STEPS,
    "kinetod.attach_helper": SERVICE_STEPS,
    "kinetod.attach_helper.attach_worker": HELPER_STEPS,
}


def hit(step: str) -> None:
    """Tells the test about the step and waits for its answer; goes on at once without a test."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(os.environ["STEPS"])
            sock.send(step.encode())
            sock.recv(1)
        except OSError:
            return


def wrapped(function: Any, step: str, side: str) -> Any:
    """The same function, with a step before it."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def with_step(*args: Any, **kwargs: Any) -> Any:
            if side == BEFORE:
                await asyncio.to_thread(hit, step)
            result = await function(*args, **kwargs)
            if side == AFTER:
                await asyncio.to_thread(hit, step)
            return result
    else:

        @functools.wraps(function)
        def with_step(*args: Any, **kwargs: Any) -> Any:
            if side == BEFORE:
                hit(step)
            result = function(*args, **kwargs)
            if (side == AFTER and result is not None) or function.__name__ in ("__init__", "check", "send"):
                hit(step)
            return result

    return with_step


def install(steps: dict[str, tuple[str, str, str]]) -> None:
    """Wraps the functions that have steps."""
    for step, (module, path, side) in steps.items():
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        before = getattr(owner, name)
        after = wrapped(before, step, side)
        setattr(owner, name, after)
        for other in list(sys.modules.values()):  # that have imported it by name
            if getattr(other, "__name__", "").startswith("kinetod") and getattr(other, name, None) is before:
                setattr(other, name, after)


def main() -> None:
    """Runs a module with its steps, and what it starts likewise."""
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    child: Any = importlib.import_module("kinetod.supervise.child")
    plain = child.python
    child.python = lambda name, *arguments: (
        (sys.executable, __file__, name, *arguments) if name in STEPS_OF else plain(name, *arguments)
    )
    steps = STEPS_OF[module]
    if module != "kinetod.attach_helper.attach_worker":
        importlib.import_module("kinetod.app")
        importlib.import_module("kinetod.attach_helper.helper_server")
    else:
        importlib.import_module("kinetod.attach_helper.attempt")
    install(steps)
    entry = importlib.import_module(module if module == "kinetod.attach_helper.attach_worker" else f"{module}.__main__")
    sys.exit(entry.main())


if __name__ == "__main__":
    main()
