"""200 captures in a row of a JAX training loop that takes traces of itself with jax.profiler all the time.

    .venv/bin/python tests/campaign/sources/jax_profiler.py [--captures 200]

Prints each capture and a summary; exit status 1 if the loop failed or wrote anything, one of its own traces was not
whole, or a verdict was untrue. It needs JAX (`pip install jax`), and no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.service.daemon import running_daemon
from support.xla.profiler_stress import stress


def main() -> int:
    """Runs the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, default=200)
    options = parser.parse_args()
    with running_daemon() as daemon:
        report = stress(daemon, options.captures, lambda text: print(text, flush=True))
    print(f"\nJAX {importlib.metadata.version('jax')}; {report.own_traces} own traces")
    for verdict, count in sorted(report.verdicts.items()):
        print(f"{count:5d}  {verdict}")
    for problem in report.problems:
        print("PROBLEM:", problem)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
