"""Small values for tests of the agent's session: requests, and what its commands hold. Runs wherever the agent runs."""

from typing import Any, List, Type

from kineto_agent.control.events import Command, Conclude, Event, SessionState, StartRequested
from kineto_agent.control.session import Session

from support.agent.agent_daemon import start_request

WAIT, WARMUP = SessionState.WAIT_FOR_REQUEST, SessionState.WARMUP
COLLECT, PROCESS = SessionState.COLLECT, SessionState.PROCESS
S = 1_000_000_000
NOW = 1000 * S
WAITING = {"wait_for_user_profiler": True}


def timed(**changes: Any) -> StartRequested:
    """A capture of 5 s, asked for now, of a program that never stepped. changes: fields of the request."""
    return StartRequested(start_request(duration_ns=5 * S, **changes), NOW, iteration=-1)


def counted(iteration: int = 10, hooked_ns: int = 0, step_ns: int = 0, **changes: Any) -> StartRequested:
    """A capture of 3 iterations, asked for now, in this iteration."""
    fields = {"duration_ns": None, "iterations": 3, **changes}
    return StartRequested(start_request(**fields), NOW, iteration, hooked_ns=hooked_ns, step_ns=step_ns)


def run(session: Session, *events: Event) -> List[Command]:
    """The commands of the last event."""
    commands: List[Command] = []
    for event in events:
        commands = session.handle(event)
    return commands


def has(commands: List[Command], kind: Type[object]) -> bool:
    """Whether the events contain a command of this kind."""
    return any(isinstance(command, kind) for command in commands)


def conclusion(commands: List[Command]) -> Conclude:
    """The capture's end, which must be among them."""
    return next(command for command in commands if isinstance(command, Conclude))
