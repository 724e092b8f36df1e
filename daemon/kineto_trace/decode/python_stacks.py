"""Stack samples ("python_stacks/1") to python_function slices.

Theory of operation
    A sample says: at this time, this thread was at this node of the stack trie. A node stands for a whole
    stack prefix, so that a function's slice is a run of consecutive samples of one thread that share the
    node at one depth. All threads are sampled at the same ticks: a run ends at the next tick, or, when the
    thread is not there at the next tick, after two sampling periods at the latest.

    The samples are sorted by thread and time; then every depth is one pass over those that are that deep,
    from the deepest up. All of it is array work.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent.arena import SPACE_PYTHON_CODE, SPACE_STACK_NODE, SPACE_THREAD_NAME, STACK_SAMPLE

from kineto_trace.model import NO_MODULE, NO_ROW, StringTable, Table, make_table
from kineto_trace.raw import RawSource

FORMAT = "python_stacks/1"
MAX_DEPTH = 1024  # frames; deeper nodes are not believed
DEFAULT_HZ = 100
_NODE = struct.Struct("<II")  # parent node, code number
_SAMPLE = np.dtype([("time", "<i8"), ("thread", "<u4"), ("node", "<u4"), ("line", "<u4"), ("reserved", "<u4")])

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSamples:
    """The slices, and what became of the samples."""

    table: Table
    records: int
    undecoded: int  # cut records, and samples whose stack is not in the string table
    out_of_window: int
    period_ns: int
    threads: Mapping[int, str]  # names that the source gave


@dataclass(frozen=True, slots=True)
class _Trie:
    """Nodes by index (1 …; 0: none): the parent's index, the depth (outermost: 0), the name's number."""

    keys: npt.NDArray[np.uint64]  # node keys, ascending; index = position + 1
    parent: Ints
    depth: Ints
    name: Ints

    def index(self, nodes: npt.NDArray[Any]) -> Ints:
        """The index of each node key; 0 for keys that are not in the table."""
        if not len(self.keys):
            return np.zeros(len(nodes), np.int64)
        at = np.searchsorted(self.keys, nodes)
        at[at == len(self.keys)] = 0
        return np.where(self.keys[at] == nodes, at + 1, 0)


def decode(source: RawSource, strings: StringTable, window_start_ns: int, window_end_ns: int) -> StackSamples:
    """Slices of the samples inside the window (both 0: of all); names go into `strings`."""
    hz = source.metadata.get("hz")
    period = 1_000_000_000 // (hz if isinstance(hz, int) and hz > 0 else DEFAULT_HZ)
    samples, cut = _samples(source)
    total = len(samples)
    if window_end_ns:
        samples = samples[(samples["time"] >= window_start_ns) & (samples["time"] < window_end_ns)]
    inside = len(samples)
    trie = _trie(source, strings)
    nodes = trie.index(samples["node"])
    samples, nodes = samples[nodes > 0], nodes[nodes > 0]
    table = _slices(samples["time"].astype(np.int64), samples["thread"], nodes, trie, period)
    return StackSamples(
        table=table,
        records=total,
        undecoded=cut + inside - len(samples),
        out_of_window=total - inside,
        period_ns=period,
        threads={
            tid: name.decode("utf-8", "replace") for tid, name in source.strings.get(SPACE_THREAD_NAME, {}).items()
        },
    )


def _samples(source: RawSource) -> tuple[npt.NDArray[Any], int]:
    """All samples, and the number of cut ones."""
    size = STACK_SAMPLE.size
    parts = [
        np.frombuffer(source.data[chunk.offset : chunk.offset + chunk.size // size * size], _SAMPLE)
        for chunk in source.chunks
    ]
    cut = sum(1 for chunk in source.chunks if chunk.size % size)
    return (np.concatenate(parts) if parts else np.empty(0, _SAMPLE)), cut


def _trie(source: RawSource, strings: StringTable) -> _Trie:
    codes = {
        number: strings.add(_function_name(text)) for number, text in source.strings.get(SPACE_PYTHON_CODE, {}).items()
    }
    keys, parents, depths, names = [], [0], [-1], [0]
    index: dict[int, int] = {0: 0}
    for key, raw in sorted(source.strings.get(SPACE_STACK_NODE, {}).items()):
        if len(raw) != _NODE.size:
            continue
        parent, code = _NODE.unpack(raw)
        above = index.get(parent)  # a parent has the smaller number, so that it is here already
        if above is None or code not in codes or depths[above] + 1 >= MAX_DEPTH:
            continue
        keys.append(key)
        index[key] = len(keys)
        parents.append(above)
        depths.append(depths[above] + 1)
        names.append(codes[code])
    return _Trie(
        np.array(keys, np.uint64), np.array(parents, np.int64), np.array(depths, np.int64), np.array(names, np.int64)
    )


def _function_name(raw: bytes) -> str:
    """Kineto's form: 'file(first line): function'."""
    file, _, rest = raw.partition(b"\0")
    line, _, function = rest.partition(b"\0")
    return "%s(%s): %s" % tuple(part.decode("utf-8", "replace") for part in (file, line, function))


def _slices(times: Ints, threads: npt.NDArray[np.uint32], nodes: Ints, trie: _Trie, period: int) -> Table:
    order = np.lexsort((times, threads))
    times, threads, nodes = times[order], threads[order], nodes[order]
    joined, ends = _continuity(times, threads, period)
    depth = trie.depth[nodes]
    levels: list[dict[str, Ints]] = []
    current = nodes.copy()
    children: dict[str, Ints] | None = None
    for level in range(int(depth.max(initial=-1)), -1, -1):
        active = np.flatnonzero(depth >= level)
        runs = _runs(active, current, joined, depth == level)
        if children is not None:
            children["parent"] = runs["run_of_sample"][np.searchsorted(active, children["first"])]
        runs["depth"] = np.full(len(runs["first"]), level)
        levels.append(runs)
        children = runs
        current[active] = trie.parent[current[active]]
    return _assemble(levels[::-1], times, ends, threads, trie)


def _continuity(times: Ints, threads: npt.NDArray[np.uint32], period: int) -> tuple[npt.NDArray[np.bool_], Ints]:
    """For every sample: whether it continues the one before it, and until when its frames were running."""
    ticks = np.unique(times)
    tick = np.searchsorted(ticks, times)
    joined = np.zeros(len(times), np.bool_)
    joined[1:] = (threads[1:] == threads[:-1]) & (tick[1:] - tick[:-1] <= 1)
    following = np.append(ticks, ticks[-1:] + period)[tick + 1] if len(ticks) else times
    ends = np.minimum(following, times + 2 * period)
    continued = np.flatnonzero(joined)
    ends[continued - 1] = times[continued]  # the thread was seen again: no limit
    return joined, ends


def _runs(active: Ints, current: Ints, joined: npt.NDArray[np.bool_], leaf: npt.NDArray[np.bool_]) -> dict[str, Ints]:
    """Runs of samples that share the node at one depth: first and last sample, node, counts."""
    node = current[active]
    begins = np.ones(len(active), np.bool_)
    begins[1:] = (active[1:] - active[:-1] != 1) | ~joined[active[1:]] | (node[1:] != node[:-1])
    starts = np.flatnonzero(begins)
    counts = np.diff(np.append(starts, len(active)))
    return {
        "first": active[starts],
        "last": active[starts + counts - 1],
        "node": node[starts],
        "samples": counts,
        "self_samples": np.add.reduceat(leaf[active].astype(np.int64), starts),
        "run_of_sample": np.cumsum(begins) - 1,
        "parent": np.full(len(starts), NO_ROW),
    }


def _assemble(levels: list[dict[str, Ints]], times: Ints, ends: Ints, threads: Any, trie: _Trie) -> Table:
    """One table from the runs of all depths, outermost first; parents become row numbers."""
    if not levels:
        return make_table("python_function", 0, {})
    above = 0
    for upper, lower in zip(levels, levels[1:], strict=False):
        lower["parent"] = lower["parent"] + above
        above += len(upper["first"])
    joined = {name: np.concatenate([level[name] for level in levels]) for name in levels[0] if name != "run_of_sample"}
    start = times[joined["first"]]
    columns = {
        "start": start,
        "duration": ends[joined["last"]] - start,
        "name": trie.name[joined["node"]],
        "thread": threads[joined["first"]],
        "depth": joined["depth"],
        "parent": joined["parent"],
        "samples": joined["samples"],
        "self_samples": joined["self_samples"],
        "module": np.full(len(start), NO_MODULE),
    }
    return make_table("python_function", len(start), columns)
