"""How long a capture of 200 ms takes in a loop that releases the GIL often, but for microseconds only.

    python tests/bench/gil_turns.py

The agent starts with the program, and this process plays the daemon. Where that is allowed, the program runs at
real-time priority, so that other work on the machine does not take the processor from the loop: that would give the
agent the GIL.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "tests")]

from kineto_agent.protocol import wire  # noqa: E402 - found through the line above
from support.agent.agent_daemon import Connection, Daemon, start_request  # noqa: E402

PERIODS = {"0.05 ms": 1000, "0.15 ms": 3000, "1.5 ms": 30000}  # about, and how many numbers are summed up in it
PROGRAM = """
import os, sys
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
except PermissionError:
    pass
import kineto_agent; kineto_agent.start()
null = os.open(os.devnull, os.O_WRONLY)
while True:
    sum(number * number for number in range(int(sys.argv[1]))); os.write(null, b"x")
"""


def capture_s(connection: Connection, name: str) -> float:
    """Seconds from the request to the result."""
    begin = time.monotonic()
    connection.send(start_request(name))
    connection.expect(wire.Result)
    taken_s = time.monotonic() - begin
    connection.send(wire.Release(name))
    return taken_s


def main() -> int:
    """Measures and prints one line for each period."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, default=8)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    for period, numbers in PERIODS.items():
        with tempfile.TemporaryDirectory() as folder, Daemon(folder + "/agent.sock") as daemon:
            env = {**os.environ, "PYTHONPATH": str(ROOT / "agent"), "KINETO_AGENT_SOCKET": daemon.path}
            program = subprocess.Popen([arguments.python, "-c", PROGRAM, str(numbers)], env=env)
            try:
                connection, _hello = daemon.welcome()
                taken_s = sorted(capture_s(connection, "c%d" % number) for number in range(arguments.captures))
                print("every %-8s %.2f to %.2f s" % (period, taken_s[0], taken_s[-1]), flush=True)
            except TimeoutError:
                print("every %-8s no answer" % period, flush=True)
            finally:
                program.kill()
                program.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
