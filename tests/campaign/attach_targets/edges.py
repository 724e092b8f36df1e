"""A target that starts and ends: `python -m campaign.attach_targets.edges CONTROL-FILE`.

It does a known amount of work as early and as late as it can: while modules are imported, in atexit functions, in
finalizers of objects that live until the interpreter's end. Its output and exit status are always the same.
EXIT_AT of the page is its signal that it begins to end.
"""

import atexit
import os
import sys
from typing import Any, List

from campaign.attach_targets.control import EXIT_AT, Control, Target
from campaign.attach_targets.loops import Loop, MallocWork, python_work

STATUS = 7
OUTPUT = b"started worked atexit finalized\n"


KEPT: List[Any] = []  # until the modules are taken apart


class Late(Target):
    """Works while the interpreter is finalized, and prints the last word."""

    def __init__(self, words: List[bytes]) -> None:
        self._words = words
        self._work, self._write = python_work, os.write
        self._wanted = python_work()

    def __del__(self) -> None:
        for _ in range(100):
            if self._work() != self._wanted:
                self._words.append(b"wrong")
        self._write(1, b" ".join([*self._words, b"finalized\n"]))


def main() -> None:
    """Runs the program. Raises SystemExit."""
    words = [b"started"]
    control = Control(sys.argv[1])
    work = Loop(MallocWork())
    KEPT.append(Late(words))
    control.ready()
    while control.running():
        work.lap()
    words.append(b"worked")

    def at_exit() -> None:
        for _ in range(100):
            work.lap()
        words.append(b"atexit")

    atexit.register(at_exit)
    control.words[EXIT_AT] = 1
    sys.exit(STATUS)


if __name__ == "__main__":
    main()
