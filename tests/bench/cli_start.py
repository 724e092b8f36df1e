"""CPU time of what people type often: kinetoctl version, ps and --help, and the start of kinetod.

    python tests/bench/cli_start.py [--rounds 20] [--address unix:/run/kinetod/kinetod.sock]

Prints the user and system time of whole processes, as the median of the rounds and as multiples of a Python that does
nothing and of one that imports gRPC: these are lower bounds for kinetoctl. Without --address, a daemon is started for
`version` and `ps`, and its own CPU time until it answers is printed. This is not a test: it measures this machine.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BIN = Path(sys.executable).parent
FLOORS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import click'": [sys.executable, "-c", "import click"],
    "python -c 'import grpc'": [sys.executable, "-c", "import grpc"],
}
COMMANDS = (["--help"], ["version", "--client"], ["version"], ["ps"], ["ps", "--all"])
START_S = 30.0


def cpu_ms(argv: Sequence[str]) -> float:
    """User and system time of one run, in ms."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


@contextmanager
def daemon() -> Iterator[str]:
    """Runs a daemon for the block; yields its address and prints what its start took."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/rpc.sock"
        began = time.monotonic()
        process = subprocess.Popen(
            [BIN / "kinetod", "--listen", address, "--agent-socket", f"{folder}/agent.sock", "--state-dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not Path(folder, "rpc.sock").exists():
                if process.poll() is not None or time.monotonic() > began + START_S:
                    raise SystemExit("kinetod does not start")
                time.sleep(0.001)
            took_ms = (time.monotonic() - began) * 1e3
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            used_ms = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK") * 1e3
            print(f"kinetod until its socket is there: {took_ms:.0f} ms, {used_ms:.0f} ms CPU")
            yield address
        finally:
            process.terminate()
            process.wait(START_S)


def measure(rounds: int, address: str) -> None:
    """Measures and prints the table."""
    commands = {f"kinetoctl {' '.join(argv)}": [str(BIN / "kinetoctl"), *argv] for argv in COMMANDS}
    os.environ["KINETO_ADDRESS"] = address
    every = {**FLOORS, **commands, "kinetod --help": [str(BIN / "kinetod"), "--help"]}
    taken: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):  # in turn: another program's load hits all alike
        for name, argv in every.items():
            taken[name].append(cpu_ms(argv))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    nothing, *_, grpc = (medians[name] for name in FLOORS)
    for name, median in medians.items():
        least = min(taken[name])
        print(
            f"{name:28} {median:6.0f} ms  least {least:4.0f}  x{median / nothing:5.1f} pass  x{median / grpc:4.2f} grpc"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--address", default="")
    arguments = parser.parse_args()
    if arguments.address:
        measure(arguments.rounds, arguments.address)
        return
    with daemon() as address:
        measure(arguments.rounds, address)


if __name__ == "__main__":
    main()
