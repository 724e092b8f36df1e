"""The agent of a live attach, in a process that nobody prepared.

Theory of operation
    `kineto_agent.bootstrap.loader` has made this module, and every other one of the agent, in a namespace of its own,
    and calls `run` with the channel to the daemon. That channel is the link. When it ends the agent leaves: the running
    capture is ended, the hook in torch's optimizers and the descriptors are taken back, the thread ends. The modules
    stay for the next attach. So do the fork hooks, which cannot be taken back, and the exit hook, whose place in the
    interpreter's list could not be either; without an agent they do nothing.

    An agent that the program has itself (kineto_agent in sys.modules) is another one, with its own link; both can
    live. Only one at a time records CUPTI (`collector_binding`).

    torch is looked for when the daemon asks something, not by a finder on sys.meta_path: taking one away from another
    thread than the one that imports can make that thread miss the finder behind it.
"""

import _thread
import atexit
import os
from typing import Any, Callable, List, Optional

from kineto_agent.control.link import Link
from kineto_agent.control.runner import Agent
from kineto_agent.sources import collector_library, registry
from kineto_agent.sources.interface import Source
from kineto_agent.steps.counting import COUNTER
from kineto_agent.steps.torch_hooks import StepHooks
from kineto_agent.system.debuglog import log
from kineto_agent.system.gil_turns import Turns

READY = b"K"  # the answer that the daemon waits for after it has sent the agent

_agent: Optional[Agent] = None
_lock = _thread.allocate_lock()  # one comes, one goes
_hooks = StepHooks(COUNTER)


def run(channel: Any, library: int, number: int, turns: int) -> Callable[[], None]:
    """Make the agent over this channel (a `_socket.socket`); its work, for the calling thread to do. A running agent
    has been ended before.

    library: memfd with the collector, -1 for none; number: no library had it before in this process. Both become
    the agent's. turns: the address that Turns takes. Raises OSError; then the caller still has the channel.
    """
    global _agent
    with _lock:
        if library >= 0:
            collector_library.bring(library, number)
        agent = Agent(COUNTER, sources=_sources, link=Link.adopted(channel), on_end=_left, turns=Turns(turns))
        try:
            channel.send(READY)
            _agent = agent
            return agent.work()
        except BaseException:
            _agent = None
            agent.abandon()
            raise


def end() -> None:
    """End the running agent, if there is one, since another one comes. Waits, but not for long."""
    agent = _agent
    if agent is not None:
        agent.stop("AGENT_STOPPED", "another live attach has replaced the agent of this one")


def _sources() -> List[Source]:
    _hooks.install(wait_for_import=False)
    return registry.sources()


def _left() -> None:
    """The end of the agent's thread."""
    global _agent
    _hooks.remove()
    with _lock:
        _agent = None
        collector_library.close()
    log("the agent of a live attach has left")


def _at_exit() -> None:
    agent = _agent
    if agent is not None:
        agent.turns.end()
        agent.stop("TARGET_EXITING", "the process exited before the capture was complete")


def _after_fork_in_child() -> None:
    global _agent, _lock
    _lock = _thread.allocate_lock()  # another thread may have held it at the time of the fork
    agent, _agent = _agent, None
    COUNTER.forget_thread()
    if agent is not None:
        agent.abandon()
        collector_library.close()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
