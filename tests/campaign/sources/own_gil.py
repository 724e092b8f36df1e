"""Live traces of programs whose threads run in interpreters with a GIL of their own, on every Python that has them.

    python tests/campaign/sources/own_gil.py [--count 20]

Prints a line for each Python and kind of trace. The exit status is 1 if a program was lost or changed, or if a
sampled trace lacks the stacks of an interpreter. Each Python takes some two minutes.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "agent", "daemon", "protos")]

from campaign.parts.attach_harness import version_of  # noqa: E402
from support.service.daemon import Daemon, running_daemon  # noqa: E402
from support.targets.own_gil import ALL_INSIDE, UNTOUCHED, own_gil_target, pythons_with_own_gils  # noqa: E402

KINDS: dict[str, list[str]] = {"samples": [], "exact calls": ["--with-stack=trace"]}


def judge(daemon: Daemon, python: Path, kind: str, count: int) -> bool:
    """Returns whether all went well; prints the outcome."""
    with own_gil_target(python) as target:
        traces = [target.trace(daemon, "1s", KINDS[kind]) for _ in range(count)]
        end = target.finish()
    verdicts = Counter(trace.verdict for trace in traces)
    complete = sum(trace.inside == ALL_INSIDE for trace in traces)
    harmed = "" if end == UNTOUCHED else f", HARMED: {end}"
    print(
        f"{version_of(python)} {kind}: {dict(verdicts)}, {complete} with stacks of all interpreters{harmed}", flush=True
    )
    return end == UNTOUCHED and set(verdicts) == {"VERDICT_DONE"} and (kind != "samples" or complete == count)


def main() -> int:
    """Runs the campaign; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="traces of each kind")
    count = parser.parse_args().count
    with running_daemon() as daemon:
        good = [judge(daemon, python, kind, count) for python in pythons_with_own_gils() for kind in KINDS]
    return 0 if good and all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
