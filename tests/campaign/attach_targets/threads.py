"""Targets with many threads of Python."""

import threading
import time
from typing import Any, Callable, Dict, List

from campaign.attach_targets.control import Target, Wrong, must_be
from campaign.attach_targets.loops import python_work


class Threads(Target):
    """The main thread and seven more do the work; a lock guards a counter."""

    def __init__(self, count: int = 8) -> None:
        self._wanted = python_work()
        self._lock = threading.Lock()
        self._counted = 0
        self._stop = False
        self._wrong: List[str] = []
        self._laps = [0] * count
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(1, count)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        while not self._stop:
            self._one(index)

    def _one(self, index: int) -> None:
        if python_work() != self._wanted:
            self._wrong.append("thread %d has another sum" % index)
        self._laps[index] += 1
        with self._lock:
            self._counted += 1

    def lap(self) -> None:
        self._one(0)

    def close(self) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()
        must_be("the counter", self._counted, sum(self._laps))
        if self._wrong:
            raise Wrong(self._wrong[0])


class Joined(Target):
    """The main thread waits for workers that compute: no pending call runs before they end."""

    def __init__(self) -> None:
        self._wanted = python_work()

    def lap(self) -> None:
        sums: List[int] = []
        until = time.monotonic() + 0.5

        def work() -> None:
            while time.monotonic() < until:
                sums.append(python_work())

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        must_be("the sums", set(sums), {self._wanted})


class Subinterpreters(Target):
    """A second interpreter with a GIL of its own (shared before 3.12) works beside the main one, in another thread."""

    def __init__(self) -> None:
        names = ("_interpreters", "_xxsubinterpreters")  # from 3.13 on; before
        self._interpreters: Any = next(filter(None, map(_imported, names)))
        self._wanted = python_work()
        self._stop = threading.Event()
        self._wrong: List[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        other = self._interpreters.create()
        while not self._stop.is_set():
            try:
                self._interpreters.run_string(other, "assert sum(i * i for i in range(3000)) == 8995500500")
            except Exception as error:
                self._wrong.append(repr(error))
                return
        self._interpreters.destroy(other)

    def lap(self) -> None:
        must_be("the sum", python_work(), self._wanted)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        must_be("errors of the other interpreter", self._wrong, [])


def _imported(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


KINDS: Dict[str, Callable[[], Target]] = {"threads": Threads, "joined": Joined, "subinterpreters": Subinterpreters}
