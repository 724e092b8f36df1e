"""kineto_agent: the light agent inside a traced process.

start()   let this process be traced on demand by the kinetod of this machine; harmless to repeat
step()    an iteration of the training loop has ended; needed only without a torch optimizer
stop()    end the agent; a running capture ends with what it has

All three are safe to call anywhere: they raise nothing and print nothing. Beside them, the environment
variables of `kineto_agent.system.env` decide everything.
"""

import sys

from kineto_agent.version import __version__

__all__ = ["__version__", "start", "step", "stop"]


def start() -> None:
    """Start the agent of this process, unless it runs already. Needs CPython 3.9 on Linux.

    A set-uid program, or one with capabilities of its file, gets none: its variables are its caller's.
    """
    if _supported():
        from kineto_agent.bootstrap import lifecycle
        from kineto_agent.system import env

        if not env.is_elevated():
            lifecycle.start()


def stop() -> None:
    """End the agent of this process, if it runs."""
    if _supported():
        from kineto_agent.bootstrap import lifecycle

        lifecycle.stop()


def step() -> None:
    """One iteration of the training loop has ended. From the first call on, optimizer steps no longer count."""
    if _supported():
        from kineto_agent.steps.counting import COUNTER

        COUNTER.step()


def _supported() -> bool:
    return sys.version_info >= (3, 9) and sys.platform == "linux"
