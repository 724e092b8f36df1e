"""The agent of a live attach, in a process that was not prepared for it.

Theory of operation
    `kineto_agent.bootstrap.loader` has loaded this module, and every other one of the agent, in a private namespace,
    and calls `run` with the channel to the daemon. That channel is the link. When it ends the agent leaves: the running
    capture ends, the hook in torch's optimizers is removed, the descriptors are closed, and the thread ends. The
    modules stay for the next attach. So do the fork hooks, which cannot be removed, and the exit hook, whose slot in
    the interpreter's list could not be either; without an agent they do nothing.

    If the program also has an agent (kineto_agent in sys.modules), that is a separate one with its own link; both can
    run. Only one at a time records with CUPTI (`collector_binding`).

    torch is looked up at each request of the daemon, not by a finder on sys.meta_path: removing a finder while another
    thread imports can make that thread skip the next finder.
"""

import _thread
import atexit
import errno
import os
from typing import Any, Callable, List, Optional

from kineto_agent.control.link import Link
from kineto_agent.control.runner import Agent
from kineto_agent.sources import collector_library, registry
from kineto_agent.sources.interface import Source
from kineto_agent.sources.torch.graph_captures import CAPTURES
from kineto_agent.steps.counting import COUNTER
from kineto_agent.steps.torch_hooks import JaxStepHooks, StepHooks
from kineto_agent.system.debuglog import log
from kineto_agent.system.gil_turns import Turns

READY = b"K"  # answer that the daemon waits for after sending the agent

_NOT_ENDED = "the agent of an earlier attach is still running and may be writing what it recorded"
_agent: Optional[Agent] = None
_lock = _thread.allocate_lock()  # guards the exchange of _agent
_hooks = StepHooks(COUNTER)
_jax_hooks = JaxStepHooks(COUNTER)


def run(channel: Any, library: int, number: int, turns: int) -> Callable[[], None]:
    """Create the agent over this channel (a `_socket.socket`); returns its work, which the calling thread must do. A
    running agent must have been ended before: its clean-up would affect this one.

    library: memfd with the collector, which becomes the agent's, -1 for none; number: unused so far by any library of
    this process. turns: the address for Turns. Raises OSError; then the caller keeps both.
    """
    global _agent
    with _lock:
        if _agent is not None and _agent.at_work:
            raise OSError(errno.EBUSY, _NOT_ENDED)
        if library >= 0:
            collector_library.bring(library, number)
        agent: Optional[Agent] = None
        try:
            agent = Agent(COUNTER, sources=_sources, link=Link.adopted(channel), on_end=_left, turns=Turns(turns))
            channel.send(READY)
            _agent = agent
            return agent.work()
        except BaseException:
            _agent = None
            collector_library.forget()
            if agent is not None:
                agent.abandon()
            raise


def end() -> None:
    """End the running agent, if there is one, to make room for another. Waits at most EXIT_TIMEOUT_S."""
    agent = _agent
    if agent is not None:
        agent.stop("AGENT_STOPPED", "another live attach has replaced this agent")


def _sources() -> List[Source]:
    _hooks.install(wait_for_import=False)
    _jax_hooks.install(wait_for_import=False)
    if _agent is not None:
        CAPTURES.install(wait_for_import=False, wake=_agent.wake)
    return registry.sources()


def _left() -> None:
    """Clean up at the end of the agent's thread."""
    global _agent
    _hooks.remove()
    _jax_hooks.remove()
    CAPTURES.remove()
    with _lock:
        _agent = None
        collector_library.close()
    log("the attached agent has ended")


def _at_exit() -> None:
    agent = _agent
    if agent is not None:
        agent.exit()


def _after_fork_in_child() -> None:
    global _agent, _lock
    _lock = _thread.allocate_lock()  # another thread may have held it at the time of the fork
    agent, _agent = _agent, None
    COUNTER.forget_thread()
    if agent is not None:
        agent.abandon()
    collector_library.close_in_child()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
