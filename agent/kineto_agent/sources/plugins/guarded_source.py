"""A plug-in as an activity source: every call goes to its worker with a deadline, and every answer is checked.

Theory of operation
    Whatever a plug-in does becomes a SourceError with one of these codes (docs/errors.md), and the capture goes on
    without it:

        PLUGIN_DECLINED  it says itself that it cannot record, and why (it raised SourceError)
        PLUGIN_FAILED    it raised anything else, or its files cannot be executed
        PLUGIN_TIMEOUT   it did not return in time: it is given up in this process (worker.py)
        PLUGIN_INVALID   it returned what the interface does not allow

    Answers become plain values of ours on the worker's thread, because asking one of its objects anything runs its
    code. What only an arena can tell is taken from the arena: the daemon reads that, not what a plug-in says.

    The files are compiled and executed when the process first shows the plug-in's signs. Signs stay: a library that was
    loaded once is not expected to go away.
"""

from typing import Any, FrozenSet, List, Optional

from kineto_agent.protocol.plugin_bundle import DETACH_NEVER, Plugin, Signs
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.plugins import deadlines
from kineto_agent.sources.plugins.namespace import Namespace
from kineto_agent.sources.plugins.plugin_session import PluginSession
from kineto_agent.sources.plugins.signs import ProcessView, is_set
from kineto_agent.sources.plugins.worker import PluginLie, PluginWorker, plain_strings

_MAX_TYPES = 64


class PluginSource:
    """The source of one plug-in. Used by the agent's thread."""

    def __init__(self, plugin: Plugin, worker: Optional[PluginWorker] = None) -> None:
        self.plugin = plugin
        self.name = plugin.name
        self.declared_types = plugin.activity_types
        self.on_request: FrozenSet[str] = plugin.activity_types if plugin.detach == DETACH_NEVER else frozenset()
        self.worker = worker or PluginWorker(plugin.name)
        self._present = False
        self._source: Any = None
        self._broken: Optional[SourceError] = None  # why its files cannot be executed here
        self._trouble: Optional[SourceError] = None

    # ------------------------------------------------------------ what it could record

    def look(self, view: ProcessView) -> None:
        """Look for the accelerator in this process."""
        self._present = self._present or view.matches(self.plugin.signs)
        self.worker.interrupt()

    def activity_types(self) -> List[str]:
        """What it says to record now, if the accelerator is here and was started as it must be."""
        if not self._present or self._lacks_variable():
            return []
        try:
            types: List[str] = self._loaded(self._ask)
            self._trouble = None
        except SourceError as exc:
            self._trouble = exc
            return []
        return types

    def trouble(self, wanted: FrozenSet[str]) -> Optional[SourceError]:
        """Why it records nothing although the accelerator is here and a request wants it. wanted: empty: the defaults.

        Of the moment at which it was asked last.
        """
        asked = wanted & self.declared_types if wanted else self.declared_types - self.on_request
        return self._trouble if self._present and asked else None

    def needs_start(self) -> str:
        """What the process lacks to be recorded, for people; "" if nothing, or if it has no such accelerator."""
        if not self._present or not self._lacks_variable():
            return ""
        return "%s records only what was started with the variable %s" % (self.name, self.plugin.needs_from_start)

    @property
    def is_present(self) -> bool:
        """Whether the process has shown the signs of the accelerator."""
        return self._present

    def looks_for(self) -> str:
        """By which signs it knows the accelerator, for people."""
        return "%s looks for %s" % (self.name, _words(self.plugin.signs))

    def why_missing(self) -> str:
        """Why one of the declared types is not offered, for people."""
        if not self._present:
            return "%s finds no sign of its accelerator in this process (%s)" % (self.name, _words(self.plugin.signs))
        if self._trouble is not None:
            return "%s: %s" % (self.name, self._trouble.reason)
        return self.needs_start() or "%s does not offer it now" % self.name

    def _lacks_variable(self) -> bool:
        return bool(self.plugin.needs_from_start) and not is_set(self.plugin.needs_from_start)

    def _loaded(self, ask: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        if self._source is None:
            try:
                self._source = self.worker.call("loading it", Namespace(self.plugin).source, deadlines.LOAD_S)
                self.on_request |= self.worker.call("on_request", self._on_request, deadlines.ASK_S)
            except SourceError as exc:
                self._broken, self._source = exc, None
                raise
        return self.worker.call("activity_types()", ask, deadlines.ASK_S)

    def _on_request(self) -> FrozenSet[str]:
        named = plain_strings(getattr(self._source, "on_request", ()), _MAX_TYPES, "on_request")
        return frozenset(self._declared(named))

    def _ask(self) -> List[str]:
        return self._declared(plain_strings(self._source.activity_types(), _MAX_TYPES, "activity types"))

    def _declared(self, named: List[str]) -> List[str]:
        strange = sorted(set(named) - self.declared_types)
        if strange:
            raise PluginLie("returned the activity type %s, which its schema does not declare" % strange[0])
        return named

    # ------------------------------------------------------------ recording

    def would_yield(self, request: SourceRequest) -> bool:
        """As the plug-in declares."""
        return "torch" in self.plugin.conflicts

    def prepare(self, request: SourceRequest) -> PluginSession:
        """Let the plug-in make its arena, and check that. Raises SourceError."""
        kind = PluginSession
        if "jax" in self.plugin.conflicts:
            from kineto_agent.sources.plugins.beside_jax import SessionBesideJax as kind
        session = kind(self.plugin, self.worker, self._source)
        session.prepare(request)
        return session


def _words(signs: Signs) -> str:
    kinds = ((kind.replace("_", " "), ", ".join(each)) for kind, each in signs._asdict().items() if each)
    return "; ".join("%s %s" % kind for kind in kinds)
