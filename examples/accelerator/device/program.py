"""A program that trains on Pebble: `python program.py LIBRARY`. It knows nothing of kinetod."""

import ctypes
import sys

KERNELS = (0, 1, 2)  # a multiplication, an addition, a reduction
pebble = ctypes.CDLL(sys.argv[1])


def train_step() -> None:
    """Eight kernels, and a wait for them."""
    for number in (0, 1, 0, 1, 0, 1, 0, 2):
        pebble.pebble_launch(number, 64, 200 if number == 0 else 50)
    pebble.pebble_wait()


print("ready", flush=True)
while True:
    train_step()
