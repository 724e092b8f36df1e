"""The one agent of this process: starting, stopping, and handling fork and exit."""

import _thread
import atexit
import contextlib
import os
from typing import Iterator, List, Optional

from kineto_agent.bootstrap import originals  # noqa: F401 - first: the others get them
from kineto_agent.control.runner import EXIT_WAIT_S, Agent
from kineto_agent.sources import collector_library, registry
from kineto_agent.sources.interface import Source
from kineto_agent.sources.torch.graph_captures import CAPTURES
from kineto_agent.steps.counting import COUNTER
from kineto_agent.steps.torch_hooks import JaxStepHooks, StepHooks
from kineto_agent.system import fork_warnings
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.gil_turns import Turns

# Guards starting and stopping; a signal handler may enter again. A caller that does not get it in time gives up.
_lock = _thread.RLock()
_LOCK_LIMIT_S = 0.02
_agent: Optional[Agent] = None
_hooks = StepHooks(COUNTER)
_jax_hooks = JaxStepHooks(COUNTER)


def start() -> None:
    """Start the agent unless it is running. Never raises."""
    global _agent
    try:
        with _locked() as locked:
            if not locked or (_agent is not None and _agent.alive):
                return
            fork_warnings.keep_away()
            _hooks.install()
            _jax_hooks.install()
            turns = Turns(library=collector_library.path())
            _agent = Agent(COUNTER, sources=_sources, on_end=turns.end, turns=turns)
            CAPTURES.install(wake=_agent.wake)
            _agent.start()
    except Exception:  # noqa: BLE001 - a program is never worse off with the agent than without
        log_exception("the agent cannot start")


def _sources() -> List[Source]:
    _hooks.look()
    return registry.sources()


def stop() -> None:
    """End the agent, if there is one. Never raises."""
    global _agent
    try:
        agent, _agent = _agent, None
        with _locked() as locked:
            if locked:
                _hooks.remove()
                _jax_hooks.remove()
                CAPTURES.remove()
        if agent is not None:
            agent.stop("AGENT_STOPPED", "the program stopped the agent before the capture was complete", EXIT_WAIT_S)
            fork_warnings.let_through()
    except Exception:  # noqa: BLE001 - a program is never worse off with the agent than without
        log_exception("the agent cannot stop")


@contextlib.contextmanager
def _locked() -> Iterator[bool]:
    """Yields True with the lock held, or False: another thread is starting or stopping the agent."""
    lock = _lock
    locked = lock.acquire(timeout=_LOCK_LIMIT_S)
    try:
        yield locked
    finally:
        if locked:
            lock.release()


def _at_exit() -> None:
    """The hooks stay: they do no harm, and a safe moment to remove them might be long in coming."""
    try:
        agent = _agent
        if agent is not None:
            agent.exit()
    except Exception:  # noqa: BLE001 - a program is never worse off with the agent than without
        log_exception("the agent failed at exit")


def _after_fork_in_child() -> None:
    global _agent, _lock
    _lock = _thread.RLock()  # another thread may have held it at the time of the fork
    agent, _agent = _agent, None
    COUNTER.forget_thread()
    if agent is not None:
        agent.abandon()
        log("forked from a process with an agent; this child has no agent")


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
