"""200 captures in a row of a training loop whose own torch.profiler schedule runs all the time.

    python tests/campaign/sources/user_profiler.py [--captures 200] [--kind NAME]... [--mode FAKE | CPU | CUDA]

Prints each capture and a summary; exit status 1 if anything crashed, one of the loop's own traces was not whole, or a
verdict was untrue. Without --mode, it uses CUDA if torch has it, else the fake libcupti.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from campaign.parts.profiler_stress import KINDS, stress
from support.service.daemon import running_daemon


def main() -> int:
    """Runs the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, default=200)
    parser.add_argument(
        "--mode", choices=("FAKE", "CPU", "CUDA"), default="CUDA" if torch.cuda.is_available() else "FAKE"
    )
    parser.add_argument("--kind", action="append", default=[], choices=[kind.name for kind in KINDS])
    options = parser.parse_args()
    with running_daemon() as daemon:
        report = stress(
            daemon, options.mode, options.captures, lambda text: print(text, flush=True), names=options.kind
        )
    print(f"\n{options.mode}, torch {torch.__version__}")
    for verdict, count in sorted(report.verdicts.items()):
        print(f"{count:5d}  {verdict}")
    for line in report.own:
        print(line)
    for problem in report.problems:
        print("PROBLEM:", problem)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
