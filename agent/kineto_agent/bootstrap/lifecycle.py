"""The one agent of this process: starting, stopping, and handling fork and exit."""

import _thread
import atexit
import os
from typing import List, Optional

from kineto_agent.control.runner import Agent
from kineto_agent.sources import collector_library, registry
from kineto_agent.sources.interface import Source
from kineto_agent.sources.torch.graph_captures import CAPTURES
from kineto_agent.steps.counting import COUNTER
from kineto_agent.steps.jax_hooks import JaxStepHooks
from kineto_agent.steps.torch_hooks import StepHooks
from kineto_agent.system import fork_warnings
from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.gil_turns import Turns

_lock = _thread.allocate_lock()
_agent: Optional[Agent] = None
_hooks = StepHooks(COUNTER)
_jax_hooks = JaxStepHooks(COUNTER)


def start() -> None:
    """Start the agent unless it is running. Never raises."""
    global _agent
    try:
        with _lock:
            if _agent is not None and _agent.alive:
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
    _end("AGENT_STOPPED", "the program stopped the agent before the capture was complete")


def _at_exit() -> None:
    agent = _agent
    if agent is not None:
        agent.turns.end()
    _end("TARGET_EXITING", "the process exited before the capture was complete")


def _end(reason_code: str, reason: str) -> None:
    global _agent
    try:
        with _lock:
            agent, _agent = _agent, None
            _hooks.remove()
            _jax_hooks.remove()
            CAPTURES.remove()
        if agent is not None:
            agent.stop(reason_code, reason)
            fork_warnings.let_through()
    except Exception:  # noqa: BLE001 - a program is never worse off with the agent than without
        log_exception("the agent cannot stop")


def _after_fork_in_child() -> None:
    global _agent, _lock
    _lock = _thread.allocate_lock()  # another thread may have held it at the time of the fork
    agent, _agent = _agent, None
    COUNTER.forget_thread()
    if agent is not None:
        agent.abandon()
        log("forked from an agent's process: this child has none")


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
