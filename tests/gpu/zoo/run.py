"""The zoo: proves that traces harm none of many real GPU programs.

    python tests/gpu/zoo/run.py --output OUT                          # all programs, in parallel
    python tests/gpu/zoo/run.py --output OUT --budget-s 560 --part 1/2
    python tests/gpu/zoo/run.py --output OUT --serial-timing --programs graph_step,jax_train
    python tests/gpu/zoo/run.py --output OUT --captures-only 1000     # over the programs with CUDA graphs
    python tests/gpu/zoo/run.py --output OUT --programs capture_ --captures-only 500 --duration-s 0.3  # they capture
    python tests/gpu/zoo/run.py --output OUT --programs healthy_ --captures-only 200 --duration-s 0.3 --jobs 1
    python tests/gpu/zoo/run.py --list

stand_still.py takes captures of programs whose kernels do not end.

Every program runs twice, started plainly: one is traced through a real kinetod, with the defaults and then with each
activity kind alone, and works on for a while; the other one, its twin, is left in peace beside it. Each program checks
its own results in every iteration and writes digests of its state at fixed iterations; those of both must be equal.
A program is HARMED if it dies, hangs, ends otherwise than it should, has other results, takes poorer traces of itself
or takes more and more memory. Columns: digests = compared; kernels = median of the captures with the defaults;
ms = median iteration before the first capture; during, after = over that (after: from 1 s after the last capture to
the end); twin = the same ratio of the untouched program over the same time; gap during, gap after = longest iteration
in ms from the first request to the last file, and from there to the end (in brackets the untouched program's over the
same time); lost = captures of CUDA graphs that the program itself has counted as lost; RSS, GPU = MiB before the first
capture / after it / at the end; 1st, med = seconds from the request to the first record, first capture and median.
With several programs at a time ratios tell little: --serial-timing runs one at a time, without a twin.

Results: OUT/zoo.json, OUT/zoo.md, folders of what failed in OUT/failed. The exit status is 1 if a program was harmed.
A session takes some 15-60 s to start, then before + captures (about the duration + 0.4 s each) + after.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
# kinetod's packages come from PYTHONPATH or an installation; those of the tests are found from here.
if __name__ == "__main__":
    sys.path[0] = str(TESTS)

from gpu.zoo import report  # noqa: E402
from gpu.zoo.captures import Tracer  # noqa: E402
from gpu.zoo.catalog import Program, load  # noqa: E402
from gpu.zoo.figures import Row  # noqa: E402
from gpu.zoo.session import Plan, run_session  # noqa: E402
from gpu.zoo.toolchain import Toolchain  # noqa: E402
from support.service.daemon import running_daemon  # noqa: E402

ALONE_S = 60.0  # kept for each program that runs alone, after the others
LEAST_S = 25.0  # below that a program is not begun any more
MOST_RATIO = 1.02


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the names of all programs, and nothing else")
    parser.add_argument("--programs", default="", help="names or parts of names, separated by commas; default: all")
    parser.add_argument("--except", dest="without", default="", help="names or parts of names that are left out")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of N parts of what is chosen")
    parser.add_argument("--stand-ins", action="store_true", help="the programs that need no GPU, instead of the zoo")
    parser.add_argument("--output", type=Path, default=Path("zoo-output"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: where a program permits it")
    parser.add_argument("--jobs", type=int, default=10, help="programs at a time, each with its twin")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="what is not done then is not run")
    parser.add_argument("--defaults", type=int, default=20, metavar="N", help="captures with the defaults")
    parser.add_argument("--each", type=int, default=5, metavar="M", help="captures of each kind alone")
    parser.add_argument("--kinds", default="", help="activity types for --each; default: all that the program offers")
    parser.add_argument("--duration-s", type=float, default=0.5, help="of each capture")
    parser.add_argument("--before-s", type=float, default=5.0)
    parser.add_argument("--after-s", type=float, default=60.0)
    parser.add_argument("--untouched-s", type=float, default=8.0, help="of the run of --reference before")
    parser.add_argument("--ready-s", type=float, default=180.0, help="how long a program may take to come up")
    parser.add_argument("--reference", choices=("beside", "before", "none"), help="default: beside; before if serial")
    parser.add_argument("--keep-agent", default="mixed", help="default, mixed (every second capture: 0) or seconds")
    parser.add_argument("--rounds", type=int, default=4, help="of programs that end by themselves")
    parser.add_argument("--serial-timing", action="store_true", help="one at a time; 2 %% slower than untouched: harm")
    parser.add_argument(
        "--captures-only", type=int, default=0, metavar="N", help="N captures over programs with graphs"
    )
    return parser.parse_args(words)


def chosen(options: argparse.Namespace) -> list[Program]:
    """The programs in the order of the catalog. Raises SystemExit where a name means none."""
    found = [one for one in load().values() if one.stand_in == options.stand_ins]
    if options.captures_only and not options.programs and not options.stand_ins:
        found = [one for one in found if one.graphs and one.end == "file"]
    if not options.programs:
        found = [one for one in found if not one.by_name]
    for wanted in filter(None, options.programs.split(",")):
        if not any(wanted in one.name for one in found):
            raise SystemExit(f"there is no program like {wanted!r}; --list names all")
    names, without = options.programs.split(","), list(filter(None, options.without.split(",")))
    found = [one for one in found if any(name in one.name for name in names)]
    found = [one for one in found if not any(name in one.name for name in without)]
    part, parts = map(int, options.part.split("/"))
    return found[part - 1 :: parts]


def plan_of(options: argparse.Namespace, programs: list[Program]) -> Plan:
    """What is done with each."""
    total = -(-options.captures_only // max(1, len(programs)))
    return Plan(
        device=options.device, defaults=options.defaults, each=options.each,
        kinds=tuple(filter(None, options.kinds.split(","))), keep_agent=options.keep_agent,
        reference=options.reference or ("before" if options.serial_timing else "beside"),
        untouched_s=options.untouched_s, before_s=options.before_s, after_s=options.after_s, ready_s=options.ready_s,
        rounds=options.rounds, total=total, deadline=time.monotonic() + options.budget_s,
    )  # fmt: skip


class Zoo:
    """All sessions, some at a time. Rows are kept as they come, so that an interruption loses none."""

    def __init__(self, options: argparse.Namespace, programs: list[Program], plan: Plan, tracer: Tracer) -> None:
        self.options, self.programs, self.plan, self.tracer = options, programs, plan, tracer
        self.scratch = Path(tempfile.mkdtemp(prefix="zoo-"))
        (self.scratch / "made").mkdir()
        self.toolchain = Toolchain(self.scratch / "made")
        self.rows: dict[str, Row] = {}
        self._lock = threading.Lock()

    def run(self) -> list[Row]:
        """The programs that may run beside others, then the rest one by one."""
        alone = [one for one in self.programs if one.alone]
        together = [one for one in self.programs if not one.alone]
        early = replace(self.plan, deadline=self.plan.deadline - ALONE_S * len(alone))
        jobs = 1 if self.options.serial_timing else self.options.jobs
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            list(pool.map(lambda one: self._one(one, early), together))
        for number, program in enumerate(alone):
            later = len(alone) - 1 - number
            self._one(program, replace(self.plan, deadline=self.plan.deadline - ALONE_S / 2 * later))
        shutil.rmtree(self.scratch, ignore_errors=True)
        return [self.rows[one.name] for one in self.programs]

    def _one(self, program: Program, plan: Plan) -> None:
        folder = self.scratch / program.name
        if plan.left_s() < LEAST_S:
            row = Row(name=program.name, state="not run", notes=["the time was over"])
        else:
            try:
                row = run_session(program, plan, self.tracer, self.toolchain, folder)
            except Exception as exc:  # of the runner itself; the other programs' rows are worth more
                row = Row(name=program.name, state="not run", notes=[f"the runner failed: {type(exc).__name__}: {exc}"])
        if self.options.serial_timing and row.ratio > MOST_RATIO * (row.twin_ratio or 1):
            row.harm(f"slower afterwards: x{row.ratio:.3f}, untouched x{row.twin_ratio:.3f}")
        if folder.exists():
            keep(folder, self.options.output / "failed" / program.name)
        with self._lock:
            self.rows[program.name] = row
            save(self.options.output, list(self.rows.values()))
            print(f"[{len(self.rows)}/{len(self.programs)}] {report.line(row)}", flush=True)


def keep(folder: Path, target: Path) -> None:
    """What a failed program has written, without its caches."""
    shutil.copytree(
        folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("inductor", "triton", "cupy", "own")
    )
    shutil.rmtree(folder, ignore_errors=True)


def save(output: Path, rows: Iterable[Row]) -> None:
    """zoo.json and zoo.md as of now."""
    rows = list(rows)
    (output / "zoo.json").write_text(json.dumps([row.as_json() for row in rows], indent=1))
    (output / "zoo.md").write_text(report.markdown(rows, report.summary_of(rows)))


def main(words: list[str] | None = None) -> int:
    """The exit status."""
    options = arguments(words)
    programs = chosen(options)
    if options.list:
        print("\n".join(one.name for one in programs))
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    many_at_once = {"KINETOD_ACCESS_REQUESTS_PER_SECOND": "1000"}
    with running_daemon("--max-captures", "64", "--decode-workers", "4", environ=many_at_once) as daemon:
        plan = plan_of(options, programs)
        rows = Zoo(options, programs, plan, Tracer(daemon, options.duration_s)).run()
        (options.output / "kinetod.log").write_text(daemon.log())
    save(options.output, rows)
    print(report.compact(rows), flush=True)
    return int(any(row.state == "HARMED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
