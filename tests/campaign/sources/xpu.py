"""Captures of Intel GPU work by the real libpti_view, every version that is recorded with and tests have.

    python tests/campaign/sources/xpu.py [--launches 1000000] [--cycles 200] [VERSION ...]

For each version: a program that nobody prepared launches so many kernels while it is traced by a live attach, and the
trace is compared with the log of the fake driver, launch by launch. Then an agent records so many times, and so many
times one is attached, records, and is detached; descriptors, threads and memory of the program are compared. Prints a
line for each; the exit status is 1 if something was lost, differed, stayed behind, or ended the program. Some five
minutes a version.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "agent", "daemon", "protos")]

from support.service.daemon import Daemon, running_daemon  # noqa: E402
from support.xpu import level_zero  # noqa: E402
from support.xpu.level_zero_program import (  # noqa: E402
    DONE,
    SECOND_NS,
    STOPPED,
    Program,
    capture,
    counts,
    differences,
    farthest_ns,
    running,
)

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES_A_SECOND = 40_000  # beside three other busy processes on two cores
SETTLED = 5  # cycles after which a program has all that it keeps
GROWTH_KIB = 512  # of a program's own memory in all cycles thereafter: an allocator's pieces
ATTACH_KIB = 8  # stays behind with each attach: docs/live-attach.md
NAMES_KIB = 7  # kept by PTI before 1.1 for the kernels of one cycle: docs/harm.md


def launches(version: str, count: int) -> bool:
    """Whether a capture of so many launches holds each of them."""
    installed = level_zero.LevelZero(version)
    with running_daemon() as daemon, tempfile.TemporaryDirectory() as folder:
        with running(installed, Path(folder), entries=count + 10_000) as program:
            before = len(program.launched())
            found = capture(
                daemon,
                program.pid,
                WORK,
                during=lambda: program.tell(f"launch {count}"),
                duration_ns=(5 + count // LAUNCHES_A_SECOND) * SECOND_NS,
                timeout_s=600,
            )
            launched = program.launched()[before:]
            wrong = differences(found.trace, launched) if found.trace is not None else ["no trace"]
            apart = farthest_ns(found.trace, launched) if not wrong else (0, 0)
            end = program.end()
        dropped = sum(each.dropped for each in found.target.counts)
        recorded = counts(found.trace)["kernel"] if found.trace is not None else 0
        good = (found.verdict, wrong, dropped, recorded, end) == (DONE, [], 0, count, (0, ""))
        print(
            f"{version}: {len(launched)} launches, {recorded} recorded, {dropped} dropped, {found.verdict[0]}; "
            f"lengths and names equal, starts {apart[0]} ns apart at the median and {apart[1]} at most"
            + ("" if good else f"; WRONG: {found.verdict}, {wrong}, the program ended with {end}"),
            flush=True,
        )
    return good


def cycles(version: str, count: int, *, keep: str, each_kib: int) -> bool:
    """Whether so many captures leave the program as it was after the first few.

    keep: for how long the agent stays after a capture. each_kib: what may stay behind with each.
    """
    installed = level_zero.LevelZero(version)
    with (
        running_daemon("--keep-agent", keep) as daemon,
        tempfile.TemporaryDirectory() as folder,
        running(installed, Path(folder), entries=count * 200 + 10_000) as program,
    ):
        used, bad = [], 0
        for _ in range(count):
            bad += not _cycle(daemon, program)
            used.append(program.tell("usage"))
        end = program.end()
    settled = used[min(SETTLED, count - 1) :]
    held = {(each["descriptors"], each["threads"]) for each in settled}
    growth = settled[-1]["own_kib"] - settled[0]["own_kib"]
    good = (bad, len(held), end) == (0, 1, (0, "")) and growth <= GROWTH_KIB + each_kib * count
    print(
        f"{version}: {count} captures, the agent stays for {keep}: {bad} wrong traces; descriptors and threads "
        f"{sorted(held)}, own memory {settled[0]['own_kib']} -> {settled[-1]['own_kib']} KiB"
        + ("" if good else f"; WRONG: the program ended with {end}"),
        flush=True,
    )
    return good


def _cycle(daemon: Daemon, program: Program) -> bool:
    before = len(program.launched())
    found = capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5"))
    return found.verdict == STOPPED and differences(found.trace, program.launched()[before:]) == []


def main() -> int:
    """Runs the campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=list(level_zero.RECORDED))
    arguments = parser.parse_args()
    if not level_zero.is_made():
        print(f"no Level Zero loader and libpti_view: {level_zero.MAKE}", file=sys.stderr)
        return 1
    good = [launches(version, arguments.launches) for version in arguments.versions if arguments.launches]
    for version in arguments.versions if arguments.cycles else ():
        names = NAMES_KIB if version < "1.1" else 0
        good.append(cycles(version, arguments.cycles, keep="1h", each_kib=names))
        good.append(cycles(version, arguments.cycles, keep="0s", each_kib=names + ATTACH_KIB))
    return 0 if good and all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
