"""Intel GPUs whose metrics can be streamed: the fake driver with metrics (tests/fakes/level_zero/fake_metrics.c).

Debian's real loader loads the driver, as on a host. It needs a C library newer than this machine's; so a process runs
under the dynamic linker of the same suite, with this Python.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from kinetod.counters.backend_group import LEVEL_ZERO
from kinetod.counters.counter_client import CounterClient, CountersService

from support.machine import native
from support.packages import debian_packages
from support.waiting import scaled, until
from support.xpu import level_zero

T = TypeVar("T")

UUIDS = tuple(f"{7 + index:02x}" * 16 for index in range(2))  # of the fake driver
SOURCES = ("fake_driver.c", "fake_metrics.c", "empty_tables.c")


def driver() -> Path:
    """The fake driver with metrics."""
    flags = ["-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-unused-parameter"]
    flags += ["-isystem", str(level_zero.FOLDER / "root" / "usr" / "include")]
    return native.build("libze_fake_metrics.so", [level_zero.SOURCES / name for name in SOURCES], flags)


class FakeIntelMetrics:
    """A host with such GPUs, for the processes with `environ`. Skips the test where Level Zero has not been made."""

    def __init__(self, folder: Path) -> None:
        if not level_zero.is_made():
            pytest.skip(f"no Level Zero loader: {level_zero.MAKE}")
        self._libraries = debian_packages.libraries(level_zero.FOLDER / "root")
        self.loader = self._libraries / "libze_loader.so.1"
        self._plan = folder / "plan"
        self._log = folder / "log"
        self.environ = {
            "ZE_ENABLE_ALT_DRIVERS": str(driver()),
            "FAKE_LEVEL_ZERO_DEVICES": "2",
            "FAKE_METRICS": str(self._plan),
            "FAKE_METRICS_LOG": str(self._log),
        }
        self.play()

    def command(self, *arguments: str) -> list[str]:
        """Python with these arguments, in a process that can load the real loader."""
        linker = next(self._libraries.glob("ld-linux-*.so.*"))
        return [str(linker), "--library-path", str(self._libraries), sys.executable, *arguments]

    def counters(self, *arguments: str) -> list[str]:
        """kinetod-counters in such a process."""
        return self.command("-P", "-m", "kinetod.counters", *arguments)

    def play(self, *lines: str) -> None:
        """Replaces the plan: see the fake's head. From the next call on."""
        scratch = self._plan.with_suffix(".new")
        scratch.write_text("".join(f"{line}\n" for line in lines))
        scratch.replace(self._plan)

    def calls(self) -> list[str]:
        """The functions that were called."""
        return [line for line in self._lines() if "WRONG" not in line]

    def wrong(self) -> list[str]:
        """What was called out of order or with the wrong sizes."""
        return [line for line in self._lines() if "WRONG" in line]

    def _lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def forget(self) -> None:
        """Empties the log."""
        self._log.unlink(missing_ok=True)


class IntelSampler(NamedTuple):
    """A kinetod-counters that listens on `path`."""

    fake: FakeIntelMetrics
    path: Path
    process: "subprocess.Popen[bytes]"

    def ended(self) -> bool:
        """Whether it has."""
        return self.process.poll() is not None

    def ask(self, body: Callable[[CounterClient], Awaitable[T]]) -> T:
        """What an asynchronous function of a client returns."""

        async def asked() -> T:
            return await body(CounterClient(CountersService(self.path), answer_s=scaled(30)))

        return asyncio.run(asked())


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        return client.connect_ex(str(path)) == 0


@contextmanager
def running_sampler(folder: Path, *, backend: str = LEVEL_ZERO, **variables: str) -> Iterator[IntelSampler]:
    """One with a socket in this folder, until the end."""
    fake = FakeIntelMetrics(folder)
    path = folder / "counters.sock"
    environ = {**os.environ, **fake.environ, **variables}
    with subprocess.Popen(
        fake.counters("--backend", backend, "--socket", str(path)), env=environ, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: _listens(path) or process.poll() is not None, "it listens")
            yield IntelSampler(fake, path, process)
        finally:
            process.kill()
