"""kineto_agent: the light agent inside a traced process.

start()   let this machine's kinetod trace this process on demand; idempotent
step()    mark the end of an iteration of the training loop; needed only without a torch optimizer
stop()    end the agent; a running capture ends with the data it has

All three are safe to call anywhere: they raise nothing and print nothing. Everything else is set by the environment
variables in `kineto_agent.system.env`.
"""

import sys

from kineto_agent.version import __version__

__all__ = ["__version__", "start", "step", "stop"]


def start() -> None:
    """Start the agent of this process unless it is running. Needs CPython 3.9 or later on Linux.

    A set-uid program, or one with file capabilities, gets no agent: its environment variables are its caller's.
    """
    if _supported():
        from kineto_agent.bootstrap import lifecycle
        from kineto_agent.system import env

        if not env.is_elevated():
            lifecycle.start()


def stop() -> None:
    """Stop the agent of this process, if it is running."""
    if _supported():
        from kineto_agent.bootstrap import lifecycle

        lifecycle.stop()


def step() -> None:
    """Mark the end of an iteration of the training loop. After the first call, optimizer steps no longer count."""
    if _supported():
        from kineto_agent.steps.counting import COUNTER

        COUNTER.step()


def _supported() -> bool:
    return sys.version_info >= (3, 9) and sys.platform == "linux"
