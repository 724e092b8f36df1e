"""Streams that last as long as somebody reads them, beyond the deadline of one call."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kinetoctl.errors import TimedOut

SHORTEST_STREAM_S = 1.0  # a stream that ends sooner is not reopened
T = TypeVar("T")


def kept_open(watch: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yields what the daemon sends as long as it does; reopens a stream that reaches its deadline."""
    while True:
        began = time.monotonic()
        try:
            yield from watch()
            return
        except TimedOut:
            if time.monotonic() - began < SHORTEST_STREAM_S:
                raise
