"""How soon processes are answered that poll at the same moment: `python tests/bench/polls.py` (root, and a C compiler).

128 processes wait for the same moment and then poll, each as its libkineto does (`native/poll_together.c`), several
times. They are answered by kinetod and by a server of a few lines in C that does nothing but answer, by turns in one
run. kinetod knows none of the processes in the first round. Everything is in a network namespace of its own, with the
kernel's default for the length of the sockets' queues (10) and with systemd's (512).

Columns: median, 90 % and max of the time from a process's first attempt to send until it has its answer, in ms; within
= share of the polls that are answered within 10 ms; full = share that found the queue full, and so waited for 10 ms or
more by libkineto's own rule; ratio = the time of median and max divided by that of the server in C.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.machine.native import ROOT, build
from support.service.daemon import running_daemon

QUEUES = (512, 10)
PERIOD_MS = 1000  # libkineto's is 5 s
SETTLE_S = 3.0  # a daemon that has just begun still imports what it needs later
GOAL_US = 10_000
QUEUE_LENGTH = Path("/proc/sys/net/unix/max_dgram_qlen")
_IN_NAMESPACE = "--in-namespace"


@contextlib.contextmanager
def in_c(program: Path) -> Iterator[None]:
    """The server that only answers."""
    with subprocess.Popen([program, "server", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        yield


@contextlib.contextmanager
def kinetod(_program: Path) -> Iterator[None]:
    """A daemon that answers polls."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write("[dynolog]\nipc = true\ncontainers = false\n")
        config.flush()
        with running_daemon("--config", config.name):
            time.sleep(SETTLE_S)
            yield


SERVERS = {"in C": in_c, "kinetod": kinetod}


class Polls:
    """The polls of one kind of round at one server: times in us, and tries."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.tries: list[int] = []

    def at(self, share: float) -> int:
        """The time within which this share of the polls was answered."""
        return sorted(self.times)[min(len(self.times) - 1, int(share * len(self.times)))]

    def row(self, base: "Polls") -> str:
        """The columns of the module's docstring."""
        median, most, count = self.at(0.5), self.at(1), len(self.times)
        within = sum(time <= GOAL_US for time in self.times) / count
        full = sum(tries > 1 for tries in self.tries) / count
        times = "".join(f"{time / 1000:>9.2f}" for time in (median, self.at(0.9), most))
        ratios = f"{median / base.at(0.5):>9.1f}{most / base.at(1):>9.1f}"
        return f"{times}{within:>9.1%}{full:>9.1%}{ratios}"


def measured(program: Path, options: argparse.Namespace) -> dict[tuple[str, bool], Polls]:
    """The polls by server and whether they were the processes' first."""
    found = {(name, first): Polls() for name in SERVERS for first in (True, False)}
    for _ in range(options.runs):
        for name, server in SERVERS.items():
            with server(program):
                command = [str(program), "clients", "-", str(options.processes), str(options.rounds), str(PERIOD_MS)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
            for line in done.stdout.splitlines():
                number, answered_us, tries = map(int, line.split())
                if answered_us < 0:
                    raise RuntimeError(f"a poll was not answered by {name}")
                polls = found[name, number == 0]
                polls.times.append(answered_us)
                polls.tries.append(tries)
    return found


def main() -> int:
    """Prints a table for each length of the queue."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(_IN_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.in_namespace:
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv, _IN_NAMESPACE])
    program = build("poll_together", [ROOT / "tests" / "bench" / "native" / "poll_together.c"], ["-O2"])
    for queue in QUEUES:
        QUEUE_LENGTH.write_text(str(queue))
        found = measured(program, options)
        columns = ("median", "90 %", "max", "within", "full", "ratio", "of max")
        print(f"queue of {queue:<12}" + "".join(f"{column:>9}" for column in columns))
        for (name, first), polls in found.items():
            label = f"{name}, {'first' if first else 'later'}"
            print(f"{label:<21}" + polls.row(found["in C", first]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
