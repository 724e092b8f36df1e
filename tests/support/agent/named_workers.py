"""Threads of which each calls functions that bear its own number: whose a record is can be read off its name."""

from __future__ import annotations  # the agent's tests run under 3.9

import random
import threading
from typing import Any, Callable

from support.waiting import scaled

_SOURCE = """
def f%(number)d():
    return g%(number)d() + len([])
def g%(number)d():
    return sum(range(200))
"""


def function(number: int) -> Callable[[], Any]:
    """A function f<number> that calls g<number>, made anew each time: old ones are freed, and their addresses used."""
    made: dict[str, Any] = {}
    exec(compile(_SOURCE % {"number": number}, "<worker>", "exec"), made)
    found: Callable[[], Any] = made["f%d" % number]
    return found


class Worker(threading.Thread):
    """Does one turn whenever it is asked to."""

    made = 0

    def __init__(self, work: Callable[[int], Any] = lambda number: function(number)()) -> None:
        super().__init__(daemon=True)
        Worker.made += 1
        self.number = Worker.made
        self._work: Callable[[int], Any] = work
        self._over = False
        self._turns, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        """Waits for turns."""
        while self._turns.acquire() and not self._over:
            self._work(self.number)
            self._done.release()

    def turn(self) -> tuple[str, int]:
        """Have it done once. Returns the name of what it has called, and the thread."""
        self._turns.release()
        assert self._done.acquire(timeout=scaled(25))
        assert self.native_id is not None
        return "f%d" % self.number, self.native_id

    def end(self) -> None:
        """End the thread."""
        self._over = True
        self._turns.release()
        self.join()


class Crew:
    """Some workers, others and in another order each time."""

    def __init__(self, seed: int, make: Callable[[], Worker] = Worker) -> None:
        self._random = random.Random(seed)
        self._make = make
        self.workers: list[Worker] = []
        self._before: list[Worker] = []  # the last change

    def change(self) -> None:
        """End some workers, begin some, and shuffle them."""
        self._before = list(self.workers)
        for _ in range(self._random.randrange(min(3, len(self.workers) + 1))):
            self.workers.pop().end()
        while len(self.workers) < 4:
            self.workers.append(self._make())
        self._random.shuffle(self.workers)

    def turns(self, *, only_new: bool = False) -> list[tuple[str, int]]:
        """Let some of them do some turns, in any order. Returns what they called, and their threads."""
        some = [worker for worker in self.workers if worker not in self._before] if only_new else self.workers[:3]
        return [self._random.choice(some).turn() for _ in range(9) if some]


def is_workers(name: str) -> bool:
    """Whether it is the name of a worker's outer function."""
    return name[0] == "f" and name[1:].isdigit()
