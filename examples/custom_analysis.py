"""An analysis of one's own: how long the GPU computes, communicates and idles in each iteration.

    python examples/custom_analysis.py TRACE [TRACE ...]

A trace is a value with one table for each kind of activity, and each column of a table is a numpy array. Times are
64-bit nanoseconds. `kinetoctl query --schema` lists the tables and columns; the views of `kinetoctl report` are made in
this way.
"""

import sys
from typing import NamedTuple

import kineto_trace as kt
import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]


class Iteration(NamedTuple):
    """One iteration of one trace, in ms. exposed: communication while nothing is computed."""

    name: str
    total: float
    computing: float
    exposed: float
    idle: float


def union_ns(start: Times, end: Times) -> int:
    """The total length of these intervals, in ns, with overlaps counted once."""
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate(([np.iinfo(np.int64).min], end[:-1]))
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


def iterations(trace: kt.Trace) -> list[Iteration]:
    """All iterations of a trace, in order."""
    kernels = trace.table("kernel")
    start, end = kernels["start"], kernels["start"] + kernels["duration"]
    communicates = np.array([name.startswith("nccl") for name in trace.strings])[kernels["name"]]
    annotations = trace.table("user_annotation")
    found = []
    for begin, duration, name in sorted(
        zip(annotations["start"].tolist(), annotations["duration"].tolist(), annotations["name"].tolist(), strict=True)
    ):
        title = trace.strings[name]
        if not title.startswith("ProfilerStep#"):
            continue
        first, last = np.clip(start, begin, begin + duration), np.clip(end, begin, begin + duration)
        computing = union_ns(first[~communicates], last[~communicates])
        busy = union_ns(first, last)
        times = (duration, computing, busy - computing, duration - busy)
        found.append(Iteration(title, *(time / 1e6 for time in times)))
    return found


def main() -> int:
    """Prints a row for each iteration of each trace."""
    print(f"{'rank':>4}  {'iteration':<18}{'total':>9}{'computing':>11}{'exposed':>9}{'idle':>8}  ms")
    for source in kt.find_traces(*sys.argv[1:]):
        for each in iterations(kt.open_trace(source.path)):
            figures = f"{each.total:9.2f}{each.computing:11.2f}{each.exposed:9.2f}{each.idle:8.2f}"
            print(f"{source.rank!s:>4}  {each.name:<18}{figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
