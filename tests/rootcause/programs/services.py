"""A recurrent network, trained with callbacks; the planted causes lie in what surrounds the training."""

import gc
import importlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rootcause.programs.clock import Clock
from rootcause.programs.slow_files import SlowFile


class Recurrent(nn.Module):
    """A GRU and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(96, 160, batch_first=True)
        self.head = nn.Linear(160, 96)

    def forward(self, values: Any) -> Any:
        """The next values."""
        return self.head(self.cells(values)[0])


class Callback:
    """Does something after each step."""

    def after_step(self, step: int) -> None:
        """Called after each step."""


class RateLimit(Callback):
    """Keeps the training from being faster than a contract allows."""

    def after_step(self, step: int) -> None:
        time.sleep(0.012)


class CollectGarbage(Callback):
    """Frees memory early, as one reads in forums."""

    def __init__(self) -> None:
        self.kept = [{"number": number, "values": [number]} for number in range(6_000)]

    def after_step(self, step: int) -> None:
        if step % 12 == 0:
            gc.collect()


class ReloadSettings(Callback):
    """Imports the settings anew, so that they can be changed while the program trains."""

    names = ("xml.dom.minidom", "csv", "colorsys", "html.entities", "email.mime.text", "wave", "calendar")

    def after_step(self, step: int) -> None:
        for name in self.names:
            sys.modules.pop(name, None)
            importlib.import_module(name)


class AskTheSystem(Callback):
    """Looks at the machine's state with a tool."""

    def after_step(self, step: int) -> None:
        subprocess.run(["/bin/sh", "-c", "cat /proc/loadavg > /dev/null; sleep 0.008"], check=True)


class SlowShare(Callback):
    """Reads whether to go on from a file on a network file system."""

    def __init__(self) -> None:
        self.file = SlowFile(0.012, 100)

    def after_step(self, step: int) -> None:
        self.file.path.read_bytes()


class SlowVolume(Callback):
    """Reads a part of a data set that is larger than the memory, from a volume that delivers little."""

    SIZE, READ = 16 << 20, 128 << 10

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(dir="/var/tmp")  # noqa: SIM115 - open as long as the program runs
        self.file.write(os.urandom(self.SIZE))
        self.file.flush()
        os.fsync(self.file.fileno())

    def after_step(self, step: int) -> None:
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.file.seek(step * self.READ % self.SIZE)
        self.file.read(self.READ)


class LookUp(Callback):
    """Keeps a table in memory and reads rows of it."""

    ROWS, ROW, READ = 128 << 10, 512, 160  # doubles: 512 MB in pages of a row each

    def __init__(self) -> None:
        self.table = torch.ones(self.ROWS, self.ROW, dtype=torch.float64)
        self.sum = 0.0

    def after_step(self, step: int) -> None:
        self.sum += self.table[torch.randint(self.ROWS, (self.READ,)), 0].sum().item()


class Statistics(Callback):
    """Counts in a lock that a thread with other things to do has most of the time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sum = 0
        threading.Thread(target=self.flush, name="flush", daemon=True).start()

    def flush(self) -> None:
        while True:
            with self.lock:
                time.sleep(0.02)
            time.sleep(0.002)

    def after_step(self, step: int) -> None:
        with self.lock:
            self.sum += step


class Handshake(Callback):
    """Gives each step to a thread that writes it somewhere, and waits for the answer."""

    def __init__(self) -> None:
        self.asked: queue.Queue[int] = queue.Queue()
        self.answered: queue.Queue[int] = queue.Queue()
        threading.Thread(target=self.serve, name="writer", daemon=True).start()

    def serve(self) -> None:
        while True:
            number = self.asked.get()
            time.sleep(0.012)
            self.answered.put(number)

    def after_step(self, step: int) -> None:
        self.asked.put(step)
        self.answered.get()


class BusyThread(Callback):
    """A thread that works in Python all the time."""

    def __init__(self) -> None:
        threading.Thread(target=self.crunch, name="metrics", daemon=True).start()

    def crunch(self) -> None:
        total = 0
        while True:
            total = (total * 31 + 7) % 1_000_003


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "sleep": RateLimit,
    "garbage_collection": CollectGarbage,
    "imports": ReloadSettings,
    "subprocess": AskTheSystem,
    "slow_share": SlowShare,
    "slow_volume": SlowVolume,
    "look_up": LookUp,
    "lock": Statistics,
    "queue": Handshake,
    "gil": BusyThread,
}


def main(planted: str) -> None:
    clock = Clock()
    if planted == "one_core":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads({"too_many_threads": 16, "one_core": 2}.get(planted, 1))
    callbacks = [CALLBACKS[planted]()] if planted in CALLBACKS else []
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    values = torch.randn(32, 24, 96)
    step = 0
    while True:
        step += 1
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(values), values)
        loss.backward()
        optimizer.step()
        for callback in callbacks:
            callback.after_step(step)
        if clock.over():
            return
