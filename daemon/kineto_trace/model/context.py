"""One trace under analysis: a part that several analyses need is computed once, when it is first requested."""

from collections.abc import Callable
from typing import Any, TypeVar

from kineto_trace.model.possible_times import with_possible_times
from kineto_trace.model.trace import Trace

T = TypeVar("T")


class Context:
    """A trace and the parts computed from it: `context.get(steps)` computes `steps(context)` once.

    Not thread-safe. worker: for a trace in a TensorBoard log folder, the process that wrote the file; otherwise "".
    """

    def __init__(self, trace: Trace, *, rank: int | None = None, worker: str = "") -> None:
        self.trace = with_possible_times(trace)
        self.worker = worker
        self.rank = rank if rank is not None else trace.target.rank or 0
        self._parts: dict[Callable[[Context], Any], Any] = {}

    def __repr__(self) -> str:
        return f"<Context of rank {self.rank}: {self.trace!r}>"

    def get(self, part: Callable[["Context"], T]) -> T:
        """Returns the part, which is computed at the first call."""
        if part not in self._parts:
            self._parts[part] = part(self)
        found: T = self._parts[part]
        return found
