"""Longest gaps of programs during a trace, for some time afterwards, and in what they do next, beside untouched twins.

    python tests/campaign/gaps.py [--program NAME ...] [--python EXECUTABLE ...] [--used-s 20] [--after-s 60]
    python tests/campaign/gaps.py --options "--duration 2s --with-modules" -- ./my_program ARGUMENTS

Without a command: each program of campaign.attach_targets.later (about 80), on every Python of this machine; it has
used some seconds of processor time when it is traced, and then does for the first time what its name says. A command of
your own keeps its gaps in the page that $KINETO_TESTS_PAGE names (campaign.attach_targets.control.Control does it) and
ends when the page says so. Prints a table in ms, the twin's figures in brackets. The exit status is 1 if a program
behaved otherwise than its twin, or if a time exceeded the twin's by more than the bound in each of several tries.
"""

import argparse
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "agent", "daemon", "protos", "cli")]

from campaign.attach_targets import later  # noqa: E402
from campaign.parts.attach_harness import machine_library, pythons, version_of  # noqa: E402
from campaign.parts.gaps import Pair, possible, table, watch, watch_once  # noqa: E402
from support.service.daemon import Daemon, running_daemon  # noqa: E402


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", action="append", choices=sorted(later.load()))
    parser.add_argument("--python", action="append", type=Path)
    parser.add_argument("--options", default="--duration 500ms --keep-agent 10min", help="of kinetoctl trace")
    parser.add_argument("--used-s", type=float, default=20.0, help="processor time of the program before its trace")
    parser.add_argument("--after-s", type=float, default=60.0)
    parser.add_argument("--bound-ms", type=float, default=20.0)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="pairs at a time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("command", nargs="*")
    return parser.parse_args()


def pair_of(options: argparse.Namespace, daemon: Daemon, name: str, python: Path) -> Pair:
    """One row of the table."""
    pair = watch(
        lambda: watch_once(
            name, daemon, python, options=shlex.split(options.options), used_s=options.used_s,
            after_s=options.after_s, command=options.command,
        ),
        options.bound_ms,
        options.tries,
    )  # fmt: skip
    print(" | ".join(pair.cells()), pair.reason, file=sys.stderr, flush=True)
    return pair


def main() -> int:
    """Runs the campaign; returns the exit status."""
    options = arguments()
    chosen = options.python or list(dict.fromkeys([*pythons(), Path(sys.executable)]))
    if options.command:
        rows = [(options.command[0], Path(sys.executable))]
    else:
        names = options.program or list(later.ACTIONS)
        has_torch = {python: possible("torch", python) for python in chosen}
        rows = [(name, each) for each in chosen for name in names if later.NEEDS[name] == "sys" or has_torch[each]]
    machine_library()  # made once, not by every thread
    with running_daemon() as daemon, ThreadPoolExecutor(options.jobs) as pool:
        pairs = list(pool.map(lambda row: pair_of(options, daemon, *row), rows))
    bad = [pair for pair in pairs if pair.differences() or pair.excess_ms() > options.bound_ms]
    told = {version_of(python) for _, python in rows}
    text = f"{table(pairs)}\n{len(pairs)} programs on {len(told)} Pythons: {len(bad)} late or otherwise than untouched"
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
