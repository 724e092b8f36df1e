"""Arrows between slices: from calls to the GPU work they caused, from forward to backward operators.

Theory of operation
    Every arrow has an id of its own, which both of its ends carry: the viewer closes a flow at its first end, so that
    the kernels of one graph launch need as many ids as there are kernels.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.links import forward_backward
from kineto_trace.arrays import lookup
from kineto_trace.model import API_TABLES, GPU_TABLES, Trace

Ints = npt.NDArray[np.int64]


class Arrows(NamedTuple):
    """Numbers of events: arrow n goes from source[n] to target[n]."""

    source: Ints
    target: Ints


def capture_arrows(trace: Trace, offsets: Mapping[str, int]) -> Arrows:
    """The arrows of a capture. offsets: the number of the first event of each table that is shown."""
    arrows = [_launches(trace, offsets)]
    links = forward_backward(trace.tables)
    if "cpu_op" in offsets:
        first = offsets["cpu_op"]
        arrows.append(Arrows(links.forward_rows + first, links.backward_rows + first))
    return Arrows(*(np.concatenate(ends) for ends in zip(*arrows, strict=True)))


def _launches(trace: Trace, offsets: Mapping[str, int]) -> Arrows:
    """From each call to the work with its correlation id."""
    calls = [kind for kind in reversed(API_TABLES) if kind in offsets]  # of equal correlations the runtime's counts
    work = [kind for kind in (*GPU_TABLES, "cuda_sync") if kind in offsets]
    if not calls or not work:
        return Arrows(np.empty(0, np.int64), np.empty(0, np.int64))

    def joined(kinds: list[str]) -> tuple[npt.NDArray[np.uint32], Ints]:
        tables = [trace.table(kind) for kind in kinds]
        numbers = [offsets[table.kind] + np.arange(len(table)) for table in tables]
        return np.concatenate([table["correlation"] for table in tables]), np.concatenate(numbers)

    (wanted, target), (known, source) = joined(work), joined(calls)
    found = lookup(wanted, known, source, -1)
    linked = (found >= 0) & (wanted != 0)
    return Arrows(found[linked], target[linked])
