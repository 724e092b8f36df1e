"""The types that the parts of the hooks exchange.

A hook is a program or an address that is notified of every ended capture. Both are processes to the daemon: the program
itself, or one that sends a request (`webhook_sender`). So a hanging one is killed at its deadline, and hooks never
affect captures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# Environment variable of a command.
ID_VARIABLE = "KINETO_CAPTURE_ID"
STATUS_VARIABLE = "KINETO_CAPTURE_STATUS"
HOST_VARIABLE = "KINETO_CAPTURE_HOST"
FOLDER_VARIABLE = "KINETO_CAPTURE_FOLDER"
FLEET_VARIABLE = "KINETO_CAPTURE_FLEET"
VARIABLES = (ID_VARIABLE, STATUS_VARIABLE, HOST_VARIABLE, FOLDER_VARIABLE, FLEET_VARIABLE)


class HookResult(StrEnum):
    """The result of one try, named as in the metrics."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An ended capture, as passed to hooks. body: the capture's JSON."""

    capture_id: str
    status: str  # DONE, PARTIAL, FAILED or CANCELLED
    variables: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HookOutcome:
    """Outcome of one try. text: the problem. again: whether a retry may succeed, not before after_s."""

    result: HookResult
    text: str = ""
    again: bool = False
    after_s: float = 0.0


class Hook(Protocol):
    """One program or address."""

    kind: str  # for the metrics
    name: str  # for messages, without secrets

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
        """One try. Raises nothing."""
        ...
