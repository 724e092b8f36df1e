"""Limits log lines that a caller could cause at will: the first is written, the others are counted.

A caller that floods the daemon must not flood its audit log too: the journal would then drop the lines of others. The
first line of a kind from a caller is written at once. Those that follow within PERIOD_S become one line at its end,
with `count`.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

PERIOD_S = 10.0
MAX_KINDS = 4096  # that are counted at a time; beyond, all others together


@dataclass(slots=True)
class _Kind:
    line: Mapping[str, Any]
    count: int = field(default=0)


class Tally:
    """Limits repeated log lines by counting them. write: called with each line to write."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None], *, period_s: float = PERIOD_S) -> None:
        self._write = write
        self._period_s = period_s
        self._kinds: dict[Hashable, _Kind] = {}

    def note(self, kind: Hashable, line: Mapping[str, Any]) -> None:
        """Writes a line, or counts it with similar ones. Call it on the event loop."""
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind, line = None, {"call": "(others)", "decision": "refused"}
        if (known := self._kinds.get(kind)) is not None:
            known.count += 1
            return
        self._kinds[kind] = _Kind(line)
        self._write(line)
        asyncio.get_running_loop().call_later(self._period_s, self._due, kind)

    def _due(self, kind: Hashable) -> None:
        known = self._kinds.pop(kind, None)
        if known is not None and known.count:
            self._write({**known.line, "count": known.count})
            self._kinds[kind] = _Kind(known.line)  # it goes on: the next ones are counted as well
            asyncio.get_running_loop().call_later(self._period_s, self._due, kind)

    def flush(self) -> None:
        """Writes the counted lines. Call it at the end."""
        kinds, self._kinds = self._kinds, {}
        for known in kinds.values():
            if known.count:
                self._write({**known.line, "count": known.count})
