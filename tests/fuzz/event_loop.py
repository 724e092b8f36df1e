"""The event loop that targets play on: one for all inputs, because making one takes longer than most inputs do."""

import asyncio
import atexit
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_loop = asyncio.new_event_loop()
atexit.register(_loop.close)


def run(asked: Coroutine[Any, Any, T]) -> T:
    """What it returns."""
    return _loop.run_until_complete(asked)
