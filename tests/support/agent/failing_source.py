"""An activity source of the agent that fails where it is told to."""

import os
from typing import Any, Dict, FrozenSet, List

from kineto_agent.sources.interface import (
    SourceCounts,
    SourceError,
    SourceOutcome,
    SourceRequest,
    SourceSession,
)


class Failing:
    """A source that fails where it is told to."""

    name = "failing"
    on_request: FrozenSet[str] = frozenset()

    def __init__(self, where: str) -> None:
        self.where = where

    def activity_types(self) -> List[str]:
        return ["kernel"]

    def would_yield(self, request: SourceRequest) -> bool:
        return False

    def prepare(self, request: SourceRequest) -> SourceSession:
        if self.where == "prepare":
            raise SourceError("CUPTI_BUSY", "Nsight is attached: detach it")
        return FailingSession(self.where)


class FailingSession:
    format = "cupti/1"
    yields = False

    def __init__(self, where: str) -> None:
        self.where = where
        self.metadata: Dict[str, Any] = {"text": "x" * 70000} if where == "announce" else {}
        self.arena_fd = os.memfd_create("failing") if hasattr(os, "memfd_create") else os.open("/dev/null", os.O_RDONLY)
        os.truncate(self.arena_fd, 8192)

    def start(self) -> None:
        if self.where == "start":
            raise RuntimeError("no driver")

    def counts(self) -> SourceCounts:
        return SourceCounts(0, 0, 0)

    def stop(self) -> SourceOutcome:
        if self.where == "stop":
            raise RuntimeError("hung up")
        return SourceOutcome(SourceCounts(5, 50, 1), {"k": 1}, ["careful"], detach_ns=7, cpu_ns=3)

    def give_way(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.arena_fd)
        if self.where == "close":
            raise RuntimeError("stuck")
