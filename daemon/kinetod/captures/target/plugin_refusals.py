"""Says in a verdict which plug-ins of the configuration could not record what was requested, because they are not used.

A capture that lacks nothing that such a plug-in might declare says nothing of it; `kinetoctl doctor` does.
"""

from collections.abc import Collection
from dataclasses import replace

from kineto_agent.sources.registry import ACTIVITY_TYPES

from kinetod.captures.result.verdict import Ending
from kinetod.plugins.plugin_loader import KnownPlugins

_UNKNOWN = "UNKNOWN_ACTIVITY_TYPE"
# Endings of requests for what a plug-in might have recorded.
_MISSED = ("NOTHING_TO_RECORD", _UNKNOWN, "ACTIVITY_TYPE_UNAVAILABLE")


def explained(ending: Ending, plugins: KnownPlugins, missing: Collection[str]) -> Ending:
    """The ending, with the plug-ins that might have recorded what is missing. missing: empty: all that was requested by
    default.
    """
    if ending.code not in _MISSED:
        return ending
    if ending.code == _UNKNOWN:
        missing = set(missing) - ACTIVITY_TYPES
    return replace(ending, reason="; ".join([ending.reason, *plugins.refusals(missing)]))
