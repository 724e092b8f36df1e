"""usage: python -m rootcause [--held-out] [--pairs] [--keep FOLDER] [--list] [NAME …]

Runs each training program with its planted cause and without it, traces both by kinetod with default options, and
prints whether the findings name the cause. About 12 s for each cause; two cores that nothing else uses.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.service.daemon import Daemon, running_daemon

from rootcause.causes import CAUSES, HELD_OUT, Cause
from rootcause.judgement import judge, without_neighbours
from rootcause.measure import NO_CPU, Measured, measure
from rootcause.table import HEADER, row, summary


def main() -> int:
    """Runs the named causes, or all. Returns 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="python -m rootcause", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--keep", type=Path, help="keep traces and findings in this folder")
    parser.add_argument("--pairs", action="store_true", help="run the control anew for each cause, not once a program")
    parser.add_argument("--held-out", action="store_true", help="the causes that were written after the rules")
    parser.add_argument("--list", action="store_true", help="show the names")
    options = parser.parse_args()
    known = HELD_OUT if options.held_out else CAUSES
    chosen = [cause for cause in known if not options.names or cause.name in options.names]
    if options.list or len(chosen) < len(set(options.names)):
        print("\n".join(cause.name for cause in known))
        return 0 if options.list else 2
    verdicts, failed = [], []
    controls: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="rootcause-") as folder, running_daemon() as daemon:
        print(HEADER, flush=True)
        for cause in chosen:
            try:
                planted = _measured(daemon, cause, cause.name, folder)
                if options.pairs or cause.program not in controls:
                    controls[cause.program] = _measured(daemon, cause, "", folder)
            except RuntimeError as exc:
                failed.append(cause.name)
                print(f"{cause.name:<24}{exc}", flush=True)
                continue
            both = [planted, controls[cause.program]]
            if options.keep:
                _keep(options.keep, cause, both)
            verdict = judge(cause, _told(planted, own=cause.name in NO_CPU), _told(both[1], own=False))
            verdicts.append(verdict)
            print(row(verdict), flush=True)
    print(summary(verdicts))
    return 1 if failed else 0


def _told(run: Measured, *, own: bool) -> tuple[float, Sequence[Mapping[str, Any]]]:
    """own: the cause itself keeps processors from the program."""
    return run.step_ms, run.findings if own else without_neighbours(run.findings, run.waited_pct)


def _measured(daemon: Daemon, cause: Cause, planted: str, parent: str) -> Measured:
    folder = Path(parent, cause.name, "planted" if planted else "control")
    folder.mkdir(parents=True)
    return measure(daemon, cause.program, planted, folder, cause.options if planted else ())


def _keep(folder: Path, cause: Cause, both: list[Measured]) -> None:
    """Copies the traces, with what was measured beside them."""
    for run, kind in zip(both, ("planted", "control"), strict=True):
        place = folder / cause.name / kind
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(run.trace, place / "trace.json.gz")
        (place / "measured.json").write_text(
            json.dumps({"step_ms": run.step_ms, "waited_pct": run.waited_pct, "findings": run.findings})
        )


if __name__ == "__main__":
    sys.exit(main())
