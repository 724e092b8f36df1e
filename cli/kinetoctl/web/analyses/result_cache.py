"""Remembers results of analyses by what they are of, within a limit of memory."""

from collections import OrderedDict
from threading import Lock
from typing import Any

MAX_BYTES = 256 << 20
MAX_ENTRIES = 500


class ResultCache:
    """Results by key, the least recently used of which go first. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._entries: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def find(self, key: str) -> Any:
        """The result, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def keep(self, key: str, value: Any, size: int) -> None:
        """Keeps a result of about `size` bytes, unless it is larger than everything together may be."""
        with self._lock:
            _, before = self._entries.pop(key, (None, 0))
            self._bytes -= before
            if size > self._max_bytes:
                return
            self._entries[key] = value, size
            self._bytes += size
            while self._bytes > self._max_bytes or len(self._entries) > MAX_ENTRIES:
                _, (_, gone) = self._entries.popitem(last=False)
                self._bytes -= gone
