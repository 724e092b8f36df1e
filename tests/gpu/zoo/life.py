"""How a program of the zoo tells the runner of its life: three files in a folder of its own.

`events` has one JSON object a line (ready, skip, digest, wrong, lost, own, end), `times` the end of every iteration as
64-bit Unix time in ns, and a file `end`, made by the runner, ends the program after the iteration that it is in. A file
`hold`, while it is there, asks a program for work on the GPU that does not end. Nothing here
starts a thread or touches the GPU, and the programs of native/ do the same in C++ (native/zoo.cuh).
"""

from __future__ import annotations

import array
import hashlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FLUSH_PERIOD_NS = 200_000_000
SKIPPED, WRONG = 77, 3  # exit statuses


class Skip(Exception):
    """The program cannot run on this machine; the text says why."""


class Wrong(Exception):
    """A result of the program is not what it must be."""


class Life:
    """The program's side. device: "cuda", or "cpu" to try the programs' logic on any machine."""

    def __init__(self, folder: Path, device: str = "cuda", most_s: float = 1800, rank: int = 0) -> None:
        self.folder, self.device, self.rank = folder, device, rank
        self.count = 0
        self._end, self._hold = str(folder / "end"), str(folder / "hold")
        self._stop_ns = time.time_ns() + int(most_s * 1e9)  # nobody is left behind by a runner that was killed
        self._times = array.array("q")
        self._flushed_ns = 0

    def event(self, name: str, **values: object) -> None:
        """One line of `events`; there at once for whoever reads the file."""
        line = json.dumps({"event": name, "at_ns": time.time_ns(), **values}) + "\n"
        descriptor = os.open(self.folder / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def ready(self, *others: int) -> None:
        """The program works from here on. others: processes that belong to it and are to be traced, too."""
        self.event("ready", pids=[os.getpid(), *others])

    def ended(self) -> bool:
        """Whether the program is to end now."""
        return os.path.exists(self._end) or time.time_ns() > self._stop_ns  # noqa: PTH110 - every iteration asks

    def held(self) -> bool:
        """Whether work that does not end is wanted now."""
        return os.path.exists(self._hold)  # noqa: PTH110 - every iteration asks

    def tick(self, digest: Callable[[], str] | None = None, every: int = 100) -> bool:
        """The end of one iteration; False: it was the last one. Every so many the digest of the state is written."""
        self.count += 1
        now = time.time_ns()
        self._times.append(now)
        if digest is not None and self.count % every == 0:
            self.event("digest", iteration=self.count, value=digest())
        if now - self._flushed_ns > FLUSH_PERIOD_NS:
            self.flush()
            self._flushed_ns = now
        return not self.ended()

    def loop(self, digest: Callable[[], str] | None = None, every: int = 100) -> Iterator[int]:
        """The numbers of the iterations until the end."""
        self.ready()
        while True:
            yield self.count
            if not self.tick(digest, every):
                return

    def flush(self) -> None:
        """Append the times to their file."""
        with (self.folder / "times").open("ab") as file:
            self._times.tofile(file)
        del self._times[:]

    def close(self) -> None:
        """The last words of a program that came to its end."""
        self.flush()
        self.event("end", iterations=self.count)

    @staticmethod
    def check(right: bool, what: str) -> None:
        """Raises Wrong."""
        if not right:
            raise Wrong(what)


def need(name: str) -> Any:
    """A module, or Skip with the reason. Any failure counts: half-installed packages raise all kinds of errors."""
    try:
        return importlib.import_module(name)
    except Exception as exc:
        text = str(exc).strip().splitlines()
        raise Skip(f"{name}: {type(exc).__name__}: {text[0] if text else ''}"[:200]) from exc


def digest_of(parts: Iterable[bytes]) -> str:
    """Short SHA-256 of some bytes."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()[:16]
