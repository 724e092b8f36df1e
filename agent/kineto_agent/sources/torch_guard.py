"""Standing aside for the program's own torch.profiler.

CUPTI has one subscriber. A Kineto (before that of August 2026) that finds it taken when it starts for the first time
gives up GPU activities for the life of the process, without a word. So while we hold it, torch's profiler is made to
tell us before it prepares: torch.autograd.profiler.profile._prepare_trace is wrapped, for the length of a capture.
"""

import sys
from typing import Any, Callable, Optional

_METHOD = "_prepare_trace"


class ProfilerGuard:
    """Calls `before` on the program's thread each time torch's profiler prepares, between install() and remove()."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before: Optional[Callable[[], None]] = before
        self._class: Any = None
        self._original: Any = None
        self._wrapper: Any = None

    def install(self) -> None:
        """Wrap the method, if torch is there."""
        self._class = getattr(sys.modules.get("torch.autograd.profiler"), "profile", None)
        self._original = getattr(self._class, "__dict__", {}).get(_METHOD)
        if self._original is None:
            return

        def prepare_trace(profile: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._before
            if before is not None:
                before()
            return self._original(profile, *args, **kwargs)

        self._wrapper = prepare_trace
        setattr(self._class, _METHOD, prepare_trace)

    def remove(self) -> None:
        """Put the method back. If somebody has wrapped it meanwhile, ours stays underneath and does nothing."""
        self._before = None
        if self._wrapper is not None and self._class.__dict__.get(_METHOD) is self._wrapper:
            setattr(self._class, _METHOD, self._original)
