"""Collectives that run on the host: those of gloo and MPI, as PyTorch annotates them on the threads that run them.

PyTorch says their names alone, as gloo:all_reduce: neither process group nor size nor number. What they are on the
host, from when a thread begins with one until it is done, is what the kernel of NCCL is on a GPU: waiting and transfer.
"""

import re

import numpy as np
import numpy.typing as npt

from kineto_trace.collectives.nccl import NO_SEQUENCE, CollectiveDescription, collective_name
from kineto_trace.collectives.rank_clocks import UNKNOWN, RankCollectives, clock_of
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES
from kineto_trace.structure.activity_links import steps

Ints = npt.NDArray[np.int64]
_ON_THE_HOST = re.compile(r"^(?:gloo|mpi):\w")


def host_collectives(context: Context) -> RankCollectives:
    """Returns what one rank without communication kernels contributes."""
    trace = context.trace
    named = matches(trace.strings, _ON_THE_HOST)
    tables = [trace.table(kind) for kind in OP_TABLES]
    chosen = [named[table["name"]] for table in tables]
    start, end, name, thread = (
        np.concatenate([values[rows] for values, rows in zip(column, chosen, strict=True)]).astype(np.int64)
        for column in (
            [table["start"] for table in tables],
            [table.end() for table in tables],
            [table["name"] for table in tables],
            [table["thread"] for table in tables],
        )
    )
    order = np.argsort(start, kind="stable")
    start, end, name, thread = start[order], end[order], name[order], thread[order]
    distinct, description = np.unique(name, return_inverse=True)
    return RankCollectives(
        host=trace.target.host,
        clock=clock_of(trace.target.clock_offset_ns, trace.target.clock_uncertainty_ns),
        start=start,
        end=end,
        description=description.astype(np.int64),
        sequence=np.full(len(start), NO_SEQUENCE),
        step=context.get(steps).number_at(start),
        launch=start,
        stream=thread,
        compute_ns=np.full(len(start), UNKNOWN),
        kernels=np.zeros(len(start), np.int64),
        descriptions=tuple(_named(trace.strings[number]) for number in distinct.tolist()),
    )


def _named(text: str) -> CollectiveDescription:
    return CollectiveDescription(
        collective=collective_name(text),
        group=None,
        group_description=None,
        ranks=(),
        size=None,
        dtype=None,
        in_bytes=None,
        out_bytes=None,
    )
