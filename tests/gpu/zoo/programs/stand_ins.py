"""Programs without a GPU and without packages, with which the runner itself is tested."""

from __future__ import annotations

import os
import signal
import sys
import time

from gpu.zoo.catalog import program
from gpu.zoo.life import Life, Skip

MODULUS = 1 << 32


def spin(life: Life, value: int = 1) -> None:
    """About a millisecond of Python an iteration."""
    state = [value]
    for _ in life.loop(lambda: f"{state[0]:x}", 20):
        for _ in range(5000):
            state[0] = (state[0] * 1664525 + 1013904223) % MODULUS


@program(stand_in=True)
def stand_in(life: Life) -> None:
    spin(life)


@program(stand_in=True)
def stand_in_skips(life: Life) -> None:
    raise Skip("it always does")


@program(stand_in=True)
def stand_in_differs(life: Life) -> None:
    """Its results depend on the process."""
    spin(life, os.getpid())


@program(stand_in=True)
def stand_in_dies(life: Life) -> None:
    for number in life.loop():
        time.sleep(0.01)
        if number > 100:
            sys.stderr.write("out of luck\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)


@program(stand_in=True)
def stand_in_is_wrong(life: Life) -> None:
    for number in life.loop():
        time.sleep(0.01)
        life.check(number < 100, "a number is too large")


@program(stand_in=True, end="term")
def stand_in_ended_by_sigterm(life: Life) -> None:
    def end(number: int, frame: object) -> None:
        life.close()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    spin(life)


@program(stand_in=True, end="self")
def stand_in_ends_by_itself(life: Life) -> None:
    for number in life.loop():
        time.sleep(0.01)
        if number > 150:
            break


@program(stand_in=True)
def stand_in_hangs(life: Life) -> None:
    life.ready()
    while True:
        time.sleep(1)


@program(stand_in=True)
def stand_in_holds(life: Life) -> None:
    """Stands still for a moment when it is to hold a GPU."""
    held = False
    for _ in life.loop():
        if life.held() != held:
            held = not held
            life.event("held" if held else "released")
            time.sleep(0.2)
        time.sleep(0.002)
