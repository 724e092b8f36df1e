"""Targets in C calls of about a second, with the GIL and without it."""

import hashlib
import re
import time
import zlib
from typing import Callable, Dict

from campaign.attach_targets.control import Target, must_be

PIECE_S = 0.6


def _sized(work: Callable[[int], object], size: int) -> int:
    """A size that takes about PIECE_S."""
    while True:
        begin = time.perf_counter()
        work(size)
        taken = time.perf_counter() - begin
        if taken > PIECE_S / 2:
            return size
        size *= 2


class LongCalls(Target):
    """Makes long calls in turn and compares each result with the first one."""

    def __init__(self, calls: Dict[str, Callable[[], object]]) -> None:
        self._calls = list(calls.items())
        self._wanted = {name: call() for name, call in self._calls}
        self._next = 0

    def lap(self) -> None:
        name, call = self._calls[self._next % len(self._calls)]
        self._next += 1
        must_be(name, call(), self._wanted[name])


def with_gil() -> Target:
    """int.__pow__, list.sort and a regular expression that backtracks never let go of the GIL."""
    power = _sized(lambda size: pow(3, size), 1 << 17)
    numbers = [(index * 7919) % 1000003 for index in range(_sized(_sort, 1 << 15))]
    expression = re.compile("(?:a+)+$")  # each letter more doubles its time
    letters = _sized(lambda size: expression.match("a" * size.bit_length() + "b"), 1 << 15).bit_length()
    return LongCalls(
        {
            "the power": lambda: pow(3, power).bit_length(),
            "the sorted list": lambda: sorted(numbers)[::5000],
            "the match": lambda: expression.match("a" * letters + "b"),
        }
    )


def _sort(size: int) -> object:
    return sorted([(index * 7919) % 1000003 for index in range(size)])


def without_gil() -> Target:
    """hashlib and zlib let go of the GIL for big buffers: no bytecode runs meanwhile, nobody waits."""
    block = bytes(range(256)) * 4096
    rounds = _sized(lambda size: hashlib.pbkdf2_hmac("sha256", b"a", b"b", size), 1 << 12)
    copies = _sized(lambda size: hashlib.sha256(block * size).digest(), 8)
    packed = _sized(lambda size: zlib.compress(block * size, 6), 8)
    big, medium = block * copies, block * packed
    return LongCalls(
        {
            "the key": lambda: hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds).hex(),
            "the digest": lambda: hashlib.sha256(big).hexdigest(),
            "the packed bytes": lambda: hashlib.md5(zlib.compress(medium, 6)).hexdigest(),
        }
    )


def with_gil_and_bystander() -> Target:
    """As most programs are: some thread waits. It can be stopped at any time."""
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return with_gil()


KINDS: Dict[str, Callable[[], Target]] = {
    "gil_held": with_gil,
    "gil_held_bystander": with_gil_and_bystander,
    "gil_free": without_gil,
}
