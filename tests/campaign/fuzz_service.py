"""Damaged input through every door of the service: `fuzz_service.py [--seconds N] [--cases N] [--seed N] [DOOR…]`.

The doors: raw (what targets recorded, through the decode worker), link (frames of agents to a daemon), agent (frames
of a daemon to an agent), calls (gRPC), polls (datagrams of libkineto). Each runs in a process of its own, beside the
others, for the given time, or for so many cases if that is sooner. A crash, a hang, an internal error of the service in
its log or answer, and growth of memory or descriptors are failures. Failing cases are kept in build/fuzz, and
`--replay FILE DOOR` runs one again.

This campaign tests the running processes for a while. `make fuzz` tests the parsers behind the doors, each alone and
guided by coverage.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import records, xla_sources
from fuzz.doors import agent, calls, link, polls
from fuzz.doors.loop import Door, Failure, kept, run

DOORS: dict[str, Callable[[Path], AbstractContextManager[Door]]] = {
    "raw": lambda folder: records.opened(folder, [xla_sources.profiled()]),
    "link": link.opened,
    "agent": agent.opened,
    "calls": calls.opened,
    "polls": polls.opened,
}
START_S = 180.0  # what the start and the end of a door may add


def one(name: str, seed: int, seconds: float, cases: int | None) -> int:
    """Fuzzes one door in this process: prints how it went, returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            with DOORS[name](Path(folder)) as door:
                print("\n".join(run(door, seed=seed, seconds=seconds, rounds=cases).lines()), flush=True)
        except (Failure, AssertionError, OSError):
            traceback.print_exc(file=sys.stdout)
            return 1
    return 0


def replayed(name: str, path: Path) -> int:
    """Replays one case that was kept."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, DOORS[name](Path(folder)) as door:
        print(door.play(kept(path)))
        door.settle()
    return 0


def started(name: str, seed: int, seconds: float, cases: int | None) -> "subprocess.Popen[bytes]":
    """Starts fuzzing a door in a process of its own."""
    words = [sys.executable, __file__, "--one", "--seed", str(seed), "--seconds", str(seconds), name]
    return subprocess.Popen(words + (["--cases", str(cases)] if cases is not None else []))


def all_of(names: list[str], seed: int, seconds: float, cases: int | None) -> int:
    """Fuzzes all these doors in parallel."""
    print(f"seed {seed}, {seconds:.0f} s each")
    running = {name: started(name, seed, seconds, cases) for name in names}
    failed = [name for name, process in running.items() if _status(process, seconds)]
    print("failed: " + ", ".join(failed) if failed else "no crash, no hang, no growth")
    return 1 if failed else 0


def _status(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    try:
        return process.wait(seconds + START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 124


def main() -> int:
    """Runs the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("doors", nargs="*", choices=[*DOORS, []], metavar="DOOR", help=", ".join(DOORS))
    words = parser.parse_args()
    names = words.doors or list(DOORS)
    if words.replay is not None:
        return replayed(names[0], words.replay)
    if words.one:
        return one(names[0], words.seed, words.seconds, words.cases)
    return all_of(names, words.seed, words.seconds, words.cases)


if __name__ == "__main__":
    sys.exit(main())
