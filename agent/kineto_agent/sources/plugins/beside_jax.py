"""Sessions of plug-ins that cannot record beside the program's own jax.profiler, which takes precedence.

sources/jax/session_guard.py says how a profiler of the program is detected before it begins. The guard is installed
before the plug-in starts: if a profiler begins in between, the plug-in has given way and does not start. A program
without JAX has no such profiler.
"""

import time
from typing import Any, Optional

from kineto_agent.protocol.plugin_bundle import Plugin
from kineto_agent.sources.interface import SourceError, SourceOutcome, SourceRequest, Takeover
from kineto_agent.sources.jax import jax_runtime
from kineto_agent.sources.jax.session_guard import SessionGuard, refuse_if_used
from kineto_agent.sources.plugins.plugin_session import PluginSession
from kineto_agent.sources.plugins.worker import PluginWorker


class SessionBesideJax(PluginSession):
    """One recording of such a plug-in."""

    def __init__(self, plugin: Plugin, worker: PluginWorker, source: Any) -> None:
        super().__init__(plugin, worker, source)
        self._guard: Optional[SessionGuard] = None
        self._taken: Optional[Takeover] = None

    def prepare(self, request: SourceRequest) -> None:
        """Prepare as for any plug-in. Also raises SourceError while the program's profiler is in use."""
        if jax_runtime.imported():
            profiler = jax_runtime.find()
            refuse_if_used(profiler)
            self._guard = SessionGuard(profiler, self._jax_begins)
        super().prepare(request)

    def start(self) -> None:
        """Begin to record. Raises SourceError."""
        if self._guard is not None:
            self._guard.enter(lambda: None)
        super().start()

    def _start(self) -> None:
        if self._taken is not None:
            raise SourceError("USER_PROFILER_STARTED", "%s has just started" % self._taken.profiler)
        super()._start()

    def taken(self) -> Optional[Takeover]:
        """When and why the recording has ended in favour of the program's profiler."""
        return self._taken

    def stop(self) -> SourceOutcome:
        """End recording. Raises SourceError."""
        try:
            return super().stop()
        finally:
            self._leave()

    def close(self) -> None:
        """Free the arena. Raises SourceError."""
        self._leave()
        super().close()

    def _leave(self) -> None:
        if self._guard is not None:
            self._guard.remove()

    def _jax_begins(self, what: str) -> None:
        """Yield, on the program's thread, under the guard's lock."""
        if self._taken is None:
            self._taken = Takeover(time.time_ns(), what, "the program's own %s" % what)
            self.make_way()
