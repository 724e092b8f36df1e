"""Runs a blocking function that callers await with a deadline."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class WithinDeadline(Generic[T]):
    """Runs `function` in a thread of its own, one call at a time. Thread-safe.

    A late call continues, and the next caller gets its result once there is one, instead of a second thread that hangs
    too. The thread is a daemon thread: it does not keep the process from ending.
    """

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        self._name = name
        self._function = function
        self._lock = threading.Lock()
        self._running: Future[T] | None = None

    def get(self, deadline_s: float) -> T:
        """Returns the result. Raises TimeoutError, and what the function raises."""
        with self._lock:
            if self._running is None:
                self._running = Future()
                threading.Thread(target=self._run, args=(self._running,), name=self._name, daemon=True).start()
            running = self._running
        return running.result(deadline_s)

    def _run(self, future: Future[T]) -> None:
        try:
            result = self._function()
        except Exception as exc:  # noqa: BLE001  # whoever waits gets it
            self._forget()
            future.set_exception(exc)
        else:
            self._forget()
            future.set_result(result)

    def _forget(self) -> None:
        with self._lock:
            self._running = None
