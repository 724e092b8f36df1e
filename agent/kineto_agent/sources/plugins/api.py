"""The parts of the agent that a plug-in's files may use, besides sources/interface.py. Stable within an interface
version.

ArenaWriter      memory that the daemon reads: see sources/arena_writer.py
DECLARED_FORMAT  the format of a session whose records the plug-in's schema declares
start_thread     starts a thread that the program does not see and that gets none of its signals
close_ours, identity
                 closes a descriptor only if the program has not closed it and reused its number
mapped_files     paths of mapped files by the beginning of their names: the copy of a library that the program uses
load_library     opens a shared library of the plug-in
kit_session      a session of a plug-in whose collector is in C (agent/native/kit/vendor.h)
log              writes to the agent's debug log (KINETO_AGENT_LOG), if there is one
"""

import ctypes
from typing import Dict, Tuple

from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.kit import kit_session as kit
from kineto_agent.system.debuglog import log
from kineto_agent.system.descriptors import close_ours, identity
from kineto_agent.system.mappings import mapped_files
from kineto_agent.system.threads import start_thread

__all__ = [
    "DECLARED_FORMAT",
    "ArenaWriter",
    "SourceCounts",
    "SourceError",
    "SourceOutcome",
    "SourceRequest",
    "close_ours",
    "identity",
    "kit_session",
    "load_library",
    "log",
    "mapped_files",
    "start_thread",
]


def load_library(name: str) -> ctypes.CDLL:
    """Load a lib….so of the plug-in, once. Raises OSError.

    Only a plug-in's own copy of this module has this function: `from kineto_agent.sources.plugins.api import
    load_library`.
    """
    raise OSError("cannot tell which plug-in %s belongs to: use `from … import load_library`" % name)


def kit_session(
    collector: ctypes.CDLL, title: str, kinds: Dict[str, Tuple[int, ...]], path: str, request: SourceRequest
) -> kit.KitSession:
    """Return a recording through the collector kit, as the result of prepare(). Raises SourceError.

    collector: a library of the plug-in that exports `kineto_vendor`, from load_library. title: of the vendor's library,
    for people. kinds: activity type -> kinds of its records, in the order in which they are enabled. path: of the
    vendor's library, which the collector opens.
    """
    vendor = kit.Vendor(name=collector._name, title=title, code="PLUGIN", format=DECLARED_FORMAT, kinds=kinds)
    return kit.prepare(vendor, path, request, yields=False)
