"""Hosts that share nothing but a wire: network namespaces of this machine, joined to it one by one. Needs root."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class NoNamespaces(Exception):
    """Network namespaces cannot be made here; the text says why."""


@dataclass(frozen=True)
class Namespace:
    """One network namespace. address: its own, reachable from this machine."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """The same command, run in the namespace."""
        return ["ip", "netns", "exec", self.name, *arguments]


@contextlib.contextmanager
def polled_namespaces() -> Iterator[None]:
    """One test at a time, of all workers, has namespaces with processes that look for a daemon there.

    Whoever looks for such namespaces finds, and takes, all that the machine has.
    """
    with Path(tempfile.gettempdir(), "kinetod-polled-namespaces").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """That many namespaces. Raises NoNamespaces."""
    made = []
    try:
        for number in range(count):
            found = Namespace(f"kinetod-{os.getpid()}-{number}", f"10.213.{number}.2")
            _run("ip", "netns", "add", found.name)
            made.append(found)
            outer = f"kt{os.getpid()}-{number}"
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", found.name)
            _run("ip", "addr", "add", f"10.213.{number}.1/30", "dev", outer)
            _run("ip", "link", "set", outer, "up")
            _run(*found.command("ip", "addr", "add", f"{found.address}/30", "dev", "eth0"))
            for device in ("lo", "eth0"):
                _run(*found.command("ip", "link", "set", device, "up"))
        yield made
    finally:
        for each in made:  # its end of the wire goes with it, and the other end with that
            subprocess.run(["ip", "netns", "del", each.name], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise NoNamespaces(f"{command[0]}: {exc.strerror}") from exc
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
