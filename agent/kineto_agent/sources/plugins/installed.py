"""The plug-ins that a daemon has sent to this process.

The modules that read and run them (plugin_bundle.py, guarded_source.py) are imported when the first ones arrive: most
processes get none.

They stay when the link ends: another daemon, or the same one after a restart, sends them again, and unchanged ones keep
what they have loaded. An abandoned one stays so, whatever is sent under its name later.
"""

import fcntl
import os
from typing import TYPE_CHECKING, Dict, List

from kineto_agent.system.debuglog import log, log_exception
from kineto_agent.system.descriptors import NOBODY, close_ours, received_memfd

if TYPE_CHECKING:
    from kineto_agent.protocol.plugin_bundle import Plugin
    from kineto_agent.sources.plugins.guarded_source import PluginSource
    from kineto_agent.sources.plugins.worker import PluginWorker

_F_GET_SEALS = 1034  # Linux; named in fcntl only if its headers had it when Python was built
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE


class InstalledPlugins:
    """The plug-ins of one process. Used by the agent's thread."""

    def __init__(self) -> None:
        self._sources: Dict[str, PluginSource] = {}  # by name
        self._given_up: Dict[str, PluginWorker] = {}  # by the plug-in's name, including plug-ins not sent now
        self._digest = ""
        self._sent = False  # by the daemon to which we are connected

    def withdraw(self) -> None:
        """Drop the plug-ins: another daemon has welcomed us, and may have none."""
        self._sent = False

    def take(self, descriptor: int, digest: str) -> None:
        """Replace the plug-ins by those in this memfd, which becomes ours. Never raises."""
        ours = received_memfd(descriptor)
        try:
            if ours == NOBODY:
                raise ValueError("the plug-ins are not in sealed memory")
            if digest != self._digest:
                from kineto_agent.protocol.plugin_bundle import unpack

                plugins = unpack(_content(descriptor))
                workers = ((name, source.worker) for name, source in self._sources.items())
                self._given_up.update((name, worker) for name, worker in workers if worker.given_up)
                self._sources = {plugin.name: self._source(plugin) for plugin in plugins}
                self._digest = digest
            self._sent = True
            log("plug-ins: %s", ", ".join(self._sources))
        except Exception:  # noqa: BLE001 - a process without plug-ins still has its own sources
            log_exception("the daemon's plug-ins cannot be loaded")
        finally:
            close_ours(descriptor, ours)

    def _source(self, plugin: "Plugin") -> "PluginSource":
        from kineto_agent.sources.plugins.guarded_source import PluginSource

        before = self._sources.get(plugin.name)
        if before is not None and before.plugin == plugin:
            return before
        return PluginSource(plugin, self._given_up.get(plugin.name))

    def sources(self) -> "List[PluginSource]":
        """All sources, after checking for their accelerators."""
        if not self._sent or not self._sources:
            return []
        from kineto_agent.sources.plugins.guarded_source import ProcessView

        view = ProcessView()
        for source in self._sources.values():
            source.look(view)
        return list(self._sources.values())

    def forget(self) -> None:
        """Forget the plug-ins in a forked child, which lacks their threads."""
        self._sources, self._given_up, self._digest, self._sent = {}, {}, "", False


def _content(descriptor: int) -> bytes:
    from kineto_agent.protocol.plugin_bundle import MAX_BUNDLE_BYTES

    seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    size = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or size > MAX_BUNDLE_BYTES:
        raise ValueError("the plug-ins' memory is too large or not sealed: %d bytes, seals %#x" % (size, seals))
    pieces: List[bytes] = []
    done = 0
    while done < size:
        pieces.append(os.pread(descriptor, size - done, done))
        done += len(pieces[-1])
    return b"".join(pieces)


PLUGINS = InstalledPlugins()
os.register_at_fork(after_in_child=PLUGINS.forget)
