"""How soon an agent is there, and how long its captures take, in loops that release the GIL often, but for
microseconds only.

    python tests/bench/gil_turns.py

The agent starts with the program, and this process plays the daemon. Printed are the time from the agent's start to its
hello, that of captures of 200 ms, and that from the loss of the connection to the next hello; the agent pauses for 0.5
to 1.5 s before it connects again.

Where that is allowed, the program runs at real-time priority, so that other work on the machine does not take the
processor from the loop: that would give the agent the GIL. This process then has a higher one, so as not to see late
what the agent says.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "tests")]

from kineto_agent.protocol import wire  # noqa: E402 - found through the line above
from support.agent.agent_daemon import Connection, Daemon, start_request  # noqa: E402

PERIODS_MS = (0.05, 0.15, 0.5, 1.5, 4.0, 4.9, 6.0)
LOOPS = ("main", "both", "others")  # the main thread, it and another one, two others while it waits for them
# argv: which threads loop, and the period in ms
PROGRAM = """
import os, sys, threading, time
import kineto_agent
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
except PermissionError:
    pass
null = os.open(os.devnull, os.O_WRONLY)
def work(numbers):
    sum(number * number for number in range(numbers))
def took_ms():
    begin = time.perf_counter(); work(100_000); return 1000 * (time.perf_counter() - begin)
numbers = int(100_000 * float(sys.argv[2]) / min(took_ms() for _ in range(9)))
def loop():
    while True:
        work(numbers); os.write(null, b"x")
threads = [threading.Thread(target=loop, daemon=True) for _ in range({"main": 0, "both": 1, "others": 2}[sys.argv[1]])]
print(time.monotonic_ns(), flush=True)
kineto_agent.start()
for thread in threads:
    thread.start()
if sys.argv[1] == "others":
    threads[0].join()
loop()
"""


def timed_s(action: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def capture(connection: Connection, name: str) -> None:
    """From the request to the result."""
    connection.send(start_request(name))
    connection.expect(wire.Result)


def captures_s(connection: Connection, count: int) -> list[float]:
    """The time of each of so many captures."""
    taken_s = []
    for name in ("c%d" % number for number in range(count)):
        taken_s.append(timed_s(partial(capture, connection, name)))
        connection.send(wire.Release(name))
    return taken_s


def measure(python: str, loops: str, period_ms: float, captures: int) -> str:
    """What one program gave, in words."""
    said = "no hello"
    with tempfile.TemporaryDirectory() as folder, Daemon(folder + "/agent.sock") as daemon:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "KINETO_AGENT_SOCKET": daemon.path}
        command = [python, "-c", PROGRAM, loops, str(period_ms)]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as program:
            try:
                assert program.stdout is not None
                began_ns = int(program.stdout.readline())
                connection, _hello = daemon.welcome()
                said = "hello %6.3f s" % ((time.monotonic_ns() - began_ns) / 1e9)
                taken_s = sorted(captures_s(connection, captures))
                said += "  captures %.2f to %.2f s" % (taken_s[0], taken_s[-1])
                connection.close()
                said += "  next hello %.2f s" % timed_s(daemon.welcome)
            except TimeoutError:
                said += "  then no answer"
            finally:
                program.kill()
    return said


def main() -> int:
    """Measures and prints one line for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, default=4)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--loops", choices=LOOPS, nargs="+", default=["main", "both"])
    parser.add_argument("--periods-ms", type=float, nargs="+", default=PERIODS_MS)
    parser.add_argument("--times", type=int, default=1, help="programs of each kind")
    arguments = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(11))
    for loops in arguments.loops:
        for period_ms in arguments.periods_ms:
            for _ in range(arguments.times):
                said = measure(arguments.python, loops, period_ms, arguments.captures)
                print("%-6s every %4.2f ms: %s" % (loops, period_ms, said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
