"""Children that are forked at every moment of an arena's life, by C code."""

import subprocess

from support.machine import native
from support.machine.sanitize import DRIVERS


def test_no_forked_child_has_the_descriptor_of_an_arena() -> None:
    flags = ["-O2", *native.COLLECTOR_HEADERS, "-Wl,--wrap=fcntl,--wrap=close"]
    sources = [native.COLLECTOR / "common" / "arena.c", DRIVERS / "drive_arena.c"]
    done = subprocess.run([native.build("drive_arena", sources, flags)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 of 22 children, 0 left\n")
