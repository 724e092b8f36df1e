"""Targets that close what they did not open, and targets with little memory."""

import os
import random
import resource
import sys
from pathlib import Path
from typing import Callable, Dict, List, Tuple

from campaign.attach_targets.control import Target, must_be
from campaign.attach_targets.loops import Loop, python_work

MOST_DESCRIPTORS = 1024
MOST_ROOM_BYTES = 16 << 20  # the stack of a thread takes 8


class Closing(Loop):
    """Closes everything, as programs do that become daemons, and at once has files of its own at those numbers."""

    ROUNDS: Tuple[int, ...] = (20, 50, 200, 1000)  # of 0.2 ms, so that it meets every moment of an attach

    def __init__(self) -> None:
        super().__init__(python_work)
        self._chance = random.Random()
        self._own: List[int] = []

    def lap(self) -> None:
        for _ in range(self._chance.choice(self.ROUNDS)):
            super().lap()
        self._check()
        os.closerange(3, MOST_DESCRIPTORS)
        self._own = [number for pair in (os.pipe() for _ in range(8)) for number in pair]
        for reader, writer in zip(self._own[::2], self._own[1::2]):
            os.write(writer, b"%d" % reader)

    def _check(self) -> None:
        for reader in self._own[::2]:
            must_be("what a pipe of the program holds", os.read(reader, 4096), b"%d" % reader)

    def close(self) -> None:
        self._check()


class ClosingOften(Closing):
    """Closes foreign descriptors every 4 ms, on a thread that keeps the GIL for longer than that once it has it."""

    ROUNDS = (20,)

    def __init__(self) -> None:
        super().__init__()
        sys.setswitchinterval(0.02)


class LittleMemory(Loop):
    """Sets another limit of its address space in each lap, a little above what it uses."""

    def __init__(self) -> None:
        super().__init__(python_work)
        self._chance = random.Random()
        self._hard = resource.getrlimit(resource.RLIMIT_AS)[1]

    def lap(self) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        room = self._chance.randrange(MOST_ROOM_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (size + room, self._hard))
        try:
            for _ in range(100):
                super().lap()
        except MemoryError:  # may be, with so little
            pass
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (self._hard, self._hard))


KINDS: Dict[str, Callable[[], Target]] = {
    "closing": Closing,
    "closing_often": ClosingOften,
    "little_memory": LittleMemory,
}
