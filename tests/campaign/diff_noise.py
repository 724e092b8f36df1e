"""Checks on any traces that `kinetoctl diff` calls nothing changed within one trace, and finds what is 20 % slower.

usage: diff_noise.py [--tries N] TRACE...      (traces with at least four whole steps; others are left out)

Null: the steps of a trace are divided into two halves at random, many times. "changed" is the mean share of rows that
are called changed, "any" the share of divisions with such a row. Power: each of the longest rows that vary by less
than 3 % from step to step is made 20 % longer in a copy of the trace. "found" is the share that the diff calls slower.

Exits with 1 if over all traces more rows are called changed, or more divisions have any, than the error rate.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from kineto_trace.analysis.diff import diff_views
from kineto_trace.analysis.diff.step_noise import ERROR_RATE, StepSamples
from kineto_trace.model.context import Context
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.view_api.view import View
from support.trace_files.step_traces import of_steps

VIEWS = (
    diff_views.diff_step_times,
    diff_views.diff_operators,
    diff_views.diff_kernel_names,
    diff_views.diff_modules,
    diff_views.diff_call_paths,
    diff_views.diff_python_functions,
)
LEAST_STEPS = 4
LONGEST = 15
STEADY = 0.03  # relative standard deviation over the steps
SLOWER_BY = 1.2


def changed(of: View, samples: StepSamples, tries: int, random: np.random.Generator) -> list[float]:
    """The share of changed rows in each division of the steps."""
    shares = []
    for _ in range(tries):
        order, half = random.permutation(len(samples.steps)), len(samples.steps) // 2
        sides = [[of_steps(samples, chosen.tolist())] for chosen in (order[:half], order[half:])]
        verdicts = diff_views.compare_jobs(of, *sides).values("verdict")
        shares.append(float(np.isin(verdicts, diff_views.CHANGES).mean()) if verdicts else 0.0)
    return shares


def found(of: View, samples: StepSamples) -> list[bool]:
    """For each of the longest steady rows whether a fifth more is found."""
    mean = np.maximum(samples.us.mean(1), 1e-9)
    noise = samples.us.std(1, ddof=1) / mean
    steady = [row for row in np.argsort(-mean).tolist() if 0 < noise[row] < STEADY and samples.calls[row].all()]
    told = []
    for row in steady[:LONGEST]:
        us = samples.us.copy()
        us[row] *= SLOWER_BY
        rows = diff_views.compare_jobs(of, [samples], [replace(samples, us=us)]).rows()
        told.append((*samples.names[row], diff_views.SLOWER) in {(r["name"], r["time"], r["verdict"]) for r in rows})
    return told


def measure(paths: Sequence[Path], tries: int) -> int:
    """Prints a line for each trace and view. Returns the exit status."""
    random, every, power = np.random.default_rng(0), [], []
    print(f"{'trace':40} {'view':18} steps  rows  changed   any  found")
    for path in paths:
        context = Context(open_trace(path))
        for of in VIEWS:
            samples = of.partial(context)
            if len(samples.steps) < LEAST_STEPS or not len(samples.names):
                continue
            shares, told = changed(of, samples, tries, random), found(of, samples)
            every += shares
            power += told
            told_of = f"{np.mean(told):6.2f}" if told else "     -"
            some = float(np.mean(np.array(shares) > 0))
            steps, rows = len(samples.steps), len(samples.names)
            print(f"{path.name[:40]:40} {of.name:18} {steps:5} {rows:5}  {np.mean(shares):7.4f} {some:5.2f} {told_of}")
    if not every:
        print("no trace has enough whole steps")
        return 1
    share, some = float(np.mean(every)), float(np.mean(np.array(every) > 0))
    print(f"changed {share:.4f}, any {some:.4f}, found {np.mean(power) if power else float('nan'):.3f} of {len(power)}")
    return int(share > ERROR_RATE or some > ERROR_RATE)


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--tries", type=int, default=40)
    values = parser.parse_args()
    return measure(values.traces, values.tries)


if __name__ == "__main__":
    sys.exit(main())
