"""Says in a verdict which plug-ins of the configuration could not record, because they are not used."""

from collections.abc import Sequence
from dataclasses import replace

from kinetod.captures.result.verdict import Ending

# Endings of requests for what a plug-in might have recorded.
_MISSED = ("NOTHING_TO_RECORD", "UNKNOWN_ACTIVITY_TYPE", "ACTIVITY_TYPE_UNAVAILABLE")


def explained(ending: Ending, refusals: Sequence[str]) -> Ending:
    """The ending, with the plug-ins that might have recorded what is missing. refusals: see `KnownPlugins`."""
    if ending.code not in _MISSED or not refusals:
        return ending
    return replace(ending, reason="; ".join([ending.reason, *refusals]))
