"""Hundreds of attaches to every kind of target on every Python of this machine, and kills of the helper.

    python tests/campaign/attach.py [--count 200] [--kind KIND ...] [--python EXECUTABLE ...] [--output FILE]

Prints a table, and why attaches did not succeed. The exit status is 1 if a target was harmed or an attach failed. All
kinds take about an hour for each Python, most of it asleep.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "agent", "daemon", "protos")]

from campaign.attach_targets.asleep import INTERRUPTED_CALLS, PYTHON_CALLS, RAW_CALLS  # noqa: E402
from campaign.attach_targets.limits import KINDS as LIMITS  # noqa: E402
from campaign.attach_targets.limits import NEEDS  # noqa: E402
from campaign.parts.attach_harness import Row, campaign, edges, machine_library, pythons, table  # noqa: E402
from campaign.parts.attach_kills import kill_moments  # noqa: E402
from support.targets.attachers import HelperAttacher  # noqa: E402

MOST_S = 0.08  # from the start or to the end of a process
KILLED = ("malloc", "threads", "asleep_poll", "registers_bystander")
MAY_BE_INTERRUPTED = [f"asleep_{name}" for name in INTERRUPTED_CALLS]  # told, but nothing can be done
# The program does not let us in, or takes from us what we need; it must go on as it was.
MAY_FAIL = ("veto_compile", "veto_exec", "veto_import", "closing", "closing_often", "little_memory")
GREEN = ("eventlet", "gevent")  # packages
CGROUPS = Path("/sys/fs/cgroup")
MACHINE = ("registers", "registers_bystander")
KINDS = (
    *(
        "python",
        "malloc",
        "threads",
        "joined",
        "gil_held",
        "gil_held_bystander",
        "gil_free",
        "gives_briefly",
        "forking",
        "workers",
        "data_loader",
    ),
    *(*MACHINE, "identity", "timers", "signals", "at_start", "at_exit"),
    *(f"asleep_{name}" for name in (*PYTHON_CALLS, *RAW_CALLS)),
    *(f"for_good_{name}" for name in PYTHON_CALLS),
    *(f"killed_{kind}" for kind in KILLED),
    *("profile", "trace", "profile_all", "trace_all", "monitoring", "cprofile", "at_the_limit", "subinterpreters"),
    *("replaced", "shadowed", *GREEN),
    *MAY_FAIL,
    *LIMITS,
)


def one(kind: str, attacher: HelperAttacher, count: int, python: Path) -> Row:
    """Runs the attaches of one row of the table."""
    if kind in ("at_start", "at_exit"):
        return edges(kind, attacher, count, python, most_s=MOST_S)
    if kind.startswith("killed_"):
        return kill_moments(kind.removeprefix("killed_"), max(1, count // 8), python)
    return campaign(kind, attacher, count, python)


def possible(kind: str, python: Path) -> bool:
    """Whether this machine and that Python have what the target needs."""
    if kind.removeprefix("killed_") in MACHINE:
        return machine_library() is not None
    if kind in NEEDS:
        return os.geteuid() == 0 and (CGROUPS / "unified").is_dir() and (CGROUPS / "memory").is_dir()
    package = "torch" if kind == "data_loader" else kind if kind in GREEN else "sys"
    return subprocess.run([python, "-c", "import " + package], capture_output=True, check=False).returncode == 0


def main() -> int:
    """Runs the campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="attaches to each target")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--python", action="append", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chosen = options.python or [*pythons(), *([Path(sys.executable)] if importlib.util.find_spec("torch") else [])]
    rows: list[Row] = []
    attacher = HelperAttacher()
    try:
        for python in chosen:
            only_torch = python == Path(sys.executable) and not options.python
            for kind in options.kind or (["data_loader"] if only_torch else KINDS):
                if possible(kind, python):
                    rows.append(_told(lambda k=kind, p=python: one(k, attacher, options.count, p)))  # type: ignore[misc]
    finally:
        attacher.close()
        text = table(rows)
        print(text)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(text + "\n")
    print(f"{sum(len(row.attempts) for row in rows)} attaches, {sum(row.count('success') for row in rows)} succeeded")
    return 0 if all(_no_harm(row) for row in rows) else 1


def _no_harm(row: Row) -> bool:
    if row.kind in MAY_FAIL:
        return row.untouched
    return row.harmless or row.kind in MAY_BE_INTERRUPTED


def _told(make: Callable[[], Row]) -> Row:
    begin = time.monotonic()
    row = make()
    counts = f"{len(row.attempts)} tries, {row.count('success')} succeeded"
    said = f"{row.python} {row.kind}: {counts}, {'no harm' if _no_harm(row) else 'HARM'}"
    print(f"{said}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
