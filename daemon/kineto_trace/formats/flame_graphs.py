"""Flame graphs: folded stacks (read by flamegraph.pl, inferno and others) and speedscope's JSON.

Theory of operation
    A stack is a node of a tree over frames; equal stacks are one node. The tree of events (structure/event_tree.py) is
    mapped to it level by level: two events have the same stack if their parents have the same stack and their names are
    equal. There are four graphs:

    - host: self time of each op, annotation or Python frame, without what it called
    - gpu: time of kernels, copies and fills, each below the stack that launched it; work of CUDA graphs also below the
      operators that captured it, where those are known
    - samples: how often each line of a Python frame was seen running itself, or waiting for the GIL
    - idle: how often each line was seen off the CPU otherwise

    The outermost frame is the thread. Times are in ns; times of overlapping GPU work add up.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent import __version__

from kineto_trace.arrays.codec import Interner
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_ROW, StringTable, Table
from kineto_trace.structure.activity_links import calls, captured_ops, gpu
from kineto_trace.structure.captured_graphs import op_paths
from kineto_trace.structure.event_tree import KINDS, EventTree, build
from kineto_trace.structure.python.python_samples import IDLE, WAITING, line_samples
from kineto_trace.structure.trace_forms import as_meant

NO_LAUNCH = "launch not in the trace"
GIL = "waiting for the GIL"
SCHEMA = "https://www.speedscope.app/file-format-schema.json"

Ints = npt.NDArray[np.int64]


class FlameGraph(StrEnum):
    """The quantity that a flame graph counts."""

    HOST = "host"
    GPU = "gpu"
    SAMPLES = "samples"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Stacks:
    """Distinct stacks, callers before callees.

    parent: place of the stack without its innermost frame; -1: none. frame: the innermost frame, a number into
    `frames`. weight: the stack's own weight, in ns or samples.
    """

    parent: Ints
    frame: Ints
    weight: Ints
    frames: Sequence[str]

    def __len__(self) -> int:
        return len(self.parent)


def stacks(context: Context, graph: FlameGraph) -> Stacks:
    """Returns the stacks of a trace with their weights; empty if the trace has no data for this graph."""
    if graph in (FlameGraph.SAMPLES, FlameGraph.IDLE):
        return _sampled(context, graph)
    meant = context.get(as_meant)
    tree = meant.get(event_tree)
    return _host(meant, tree) if graph is FlameGraph.HOST else _gpu(meant, tree)


def event_tree(context: Context) -> EventTree:
    """Returns the tree of ops, annotations and Python frames of the trace."""
    trace = context.trace
    return build(trace.tables, trace.window_end_ns, sample_period_ns=trace.sample_period_ns)


# ------------------------------------------------------------ trees to stacks


class _Builder:
    """Numbers stacks: (the caller's stack, frame) -> stack."""

    def __init__(self, context: Context) -> None:
        self._known = Interner()
        self._strings = StringTable()
        self.frames = self._strings.strings
        for text in context.trace.strings:  # frames 0 … are the names of the trace
            self.frames.append(text)
        self._threads = context.trace.target.threads

    def frame(self, text: str) -> int:
        """Adds a frame that is not a name of the trace, and returns its number."""
        self.frames.append(text)
        return len(self.frames) - 1

    def thread_frames(self, threads: npt.NDArray[Any]) -> Ints:
        """Returns the frame number of each thread id."""
        ids, place = np.unique(threads, return_inverse=True)
        names = [self._threads.get(tid, "") for tid in ids.tolist()]
        frames = [
            self.frame(f"thread {tid} ({name})" if name else f"thread {tid}")
            for tid, name in zip(ids.tolist(), names, strict=True)
        ]
        return np.array(frames, np.int64)[place.reshape(-1)]

    def add(self, parent: Ints, frame: npt.NDArray[Any]) -> Ints:
        """Returns the stack of each pair of a caller's stack (-1: none) and a frame."""
        keys = (parent.astype(np.int64) + 1).astype(np.uint64) << np.uint64(32) | frame.astype(np.uint64)
        return self._known.intern(keys).astype(np.int64)

    def finish(self, stack: Ints, weight: Ints) -> Stacks:
        """Returns all stacks, with the sum of the weights of each."""
        keys = self._known.keys()
        total = np.zeros(len(keys), np.int64)
        np.add.at(total, stack, weight)
        parent = (keys >> np.uint64(32)).astype(np.int64) - 1
        return Stacks(parent, (keys & np.uint64(0xFFFFFFFF)).astype(np.int64), total, self.frames)

    def tree(self, parent: npt.NDArray[Any], depth: npt.NDArray[Any], root: Ints, frame: npt.NDArray[Any]) -> Ints:
        """Returns the stack of each node of a tree. root: for each node, the stack around its outermost ancestor."""
        found = np.empty(len(parent), np.int64)
        order = np.argsort(depth, kind="stable")
        ends = np.cumsum(np.bincount(depth)) if len(depth) else np.zeros(0, np.int64)
        first = 0
        for end in ends.tolist():
            nodes = order[first:end]
            above = root[nodes] if first == 0 else found[parent[nodes]]
            found[nodes] = self.add(above, frame[nodes])
            first = end
        return found


def _tree_stacks(context: Context, tree: EventTree, builder: _Builder) -> Ints:
    """Returns the stack of each node of the event tree, below its thread."""
    frame = np.zeros(len(tree), np.int64)
    for number, kind in enumerate(KINDS):
        own = np.flatnonzero(tree.kind == number)
        frame[own] = context.trace.table(kind)["name"][tree.row[own]]
    threads = builder.add(np.full(len(tree), -1), builder.thread_frames(tree.thread)) if len(tree) else frame
    return builder.tree(tree.parent, tree.depth, threads, frame)


def _host(context: Context, tree: EventTree) -> Stacks:
    builder = _Builder(context)
    return builder.finish(_tree_stacks(context, tree, builder), tree.self_ns)


def _gpu(context: Context, tree: EventTree) -> Stacks:
    builder = _Builder(context)
    work, called = context.get(gpu), context.get(calls)
    if not len(work):
        return builder.finish(np.empty(0, np.int64), np.empty(0, np.int64))
    inside = _tree_stacks(context, tree, builder)
    known = np.flatnonzero(work.call >= 0)
    call = work.call[known]
    above = np.full(len(work), -1, np.int64)
    above[known] = builder.add(np.full(len(known), -1), builder.thread_frames(called.thread[call]))
    node = np.full(len(work), NO_ROW, np.int64)
    node[known] = tree.innermost(called.thread[call], called.start[call])
    by_op = np.flatnonzero((node == NO_ROW) & (work.op >= 0))
    node[by_op] = tree.nodes_of("cpu_op", len(context.trace.table("cpu_op")))[work.op[by_op]]
    placed = np.flatnonzero(node >= 0)
    above[placed] = inside[node[placed]]
    lost = np.flatnonzero(above < 0)
    if len(lost):
        above[lost] = builder.add(np.full(len(lost), -1), np.full(len(lost), builder.frame(NO_LAUNCH)))
    _add_captured_ops(context, builder, above)
    stack = builder.add(above, work.name)
    return builder.finish(stack, work.end - work.start)


def _add_captured_ops(context: Context, builder: _Builder, above: Ints) -> None:
    """Adds to the stack of each GPU activity the operators that captured it into its CUDA graph."""
    operator, paths = context.get(captured_ops), context.get(op_paths)
    for level in range(max(map(len, paths), default=0)):
        names = np.array([path[level] if level < len(path) else NO_ROW for path in paths] + [NO_ROW], np.int64)
        deep = np.flatnonzero(names[operator] != NO_ROW)
        above[deep] = builder.add(above[deep], names[operator[deep]])


def _sampled(context: Context, graph: FlameGraph) -> Stacks:
    """Puts the lines of each innermost frame below it, and below a line what its thread waited for."""
    builder = _Builder(context)
    table = context.trace.table("python_function")
    if not table["samples"].any():
        return builder.finish(np.empty(0, np.int64), np.empty(0, np.int64))
    threads = builder.add(np.full(len(table), -1), builder.thread_frames(table["thread"]))
    stack = builder.tree(table["parent"], _depths(table), threads, table["name"])
    found = line_samples(context.trace)
    seen = found.busy if graph is FlameGraph.SAMPLES else found.counts[:, IDLE]
    leaf = _lines(builder, stack[found.row], found.line)
    waiting = np.flatnonzero(found.counts[:, WAITING] * (graph is FlameGraph.SAMPLES))
    waits = builder.add(leaf[waiting], np.full(len(waiting), builder.frame(GIL)))
    return builder.finish(np.append(leaf, waits), np.append(seen, found.counts[waiting, WAITING]))


def _lines(builder: _Builder, stack: Ints, line: Ints) -> Ints:
    """Returns the stacks with the line as their innermost frame, if it is known."""
    known = np.flatnonzero(line > 0)
    numbers, place = np.unique(line[known], return_inverse=True)
    frames = np.array([builder.frame(f"line {number}") for number in numbers.tolist()], np.int64)
    found = stack.copy()
    found[known] = builder.add(stack[known], frames[place.reshape(-1)])
    return found


def _depths(table: Table) -> npt.NDArray[Any]:
    """Returns the number of callers of each row. Rows in a cycle of callers (never recorded) count as outermost."""
    parent, recorded = table["parent"], table["depth"]
    if np.array_equal(recorded, np.where(parent == NO_ROW, 0, recorded[parent] + 1)):
        return recorded
    depth = np.where(parent == NO_ROW, 0, -1).astype(np.int64)
    for level in range(1, len(parent) + 1):
        below = np.flatnonzero((depth < 0) & (depth[parent] == level - 1))
        if not len(below):
            break
        depth[below] = level
    return np.maximum(depth, 0)


# ------------------------------------------------------------ files


def folded(found: Stacks) -> bytes:
    """Returns one line per stack with weight: its frames (outermost first, separated by ;), a space, the weight."""
    safe = {number: _folded_frame(found.frames[number]) for number in np.unique(found.frame).tolist()}
    lines = (";".join(safe[frame] for frame in path) + f" {weight}\n" for path, weight in _paths(found))
    return "".join(lines).encode("utf-8", "replace")


def _paths(found: Stacks) -> Iterator[tuple[list[int], int]]:
    """Yields the frames of each stack that has weight, outermost first, and the weight."""
    parents, frames, weights = found.parent.tolist(), found.frame.tolist(), found.weight.tolist()
    for place in np.flatnonzero(found.weight > 0).tolist():
        path, at = [], place
        while at >= 0:
            path.append(frames[at])
            at = parents[at]
        yield path[::-1], weights[place]


def _folded_frame(text: str) -> str:
    return " ".join(text.replace(";", ":").split()) or "?"


def speedscope(graphs: Mapping[FlameGraph, Stacks], name: str) -> bytes:
    """Returns one profile per graph that has any weight; GPU time first, then host time."""
    numbers = StringTable()
    profiles = [
        _profile(graph, graphs[graph], numbers) for graph in _ORDER if graph in graphs and graphs[graph].weight.any()
    ]
    value = {
        "$schema": SCHEMA,
        "name": name,
        "activeProfileIndex": 0,
        "exporter": f"kinetod {__version__}",
        "shared": {"frames": [{"name": text} for text in numbers.strings]},
        "profiles": profiles,
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


_ORDER = (FlameGraph.GPU, FlameGraph.HOST, FlameGraph.SAMPLES, FlameGraph.IDLE)
_TITLES = {
    FlameGraph.GPU: "GPU time by launching stack",
    FlameGraph.HOST: "host time",
    FlameGraph.SAMPLES: "Python samples",
    FlameGraph.IDLE: "Python samples, idle",
}


def _profile(graph: FlameGraph, found: Stacks, numbers: StringTable) -> dict[str, Any]:
    own = {number: numbers.add(found.frames[number]) for number in np.unique(found.frame).tolist()}
    samples, weights = [], []
    for path, weight in _paths(found):
        samples.append([own[frame] for frame in path])
        weights.append(weight)
    return {
        "type": "sampled",
        "name": _TITLES[graph],
        "unit": "none" if graph in (FlameGraph.SAMPLES, FlameGraph.IDLE) else "nanoseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
