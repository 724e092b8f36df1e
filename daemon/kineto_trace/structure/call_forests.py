"""Forests of calls below their callers, each with its self time, and call stacks: the basis of flame graphs.

Theory of operation
    A forest has a node for every call, below a node for its thread. There are these forests:

    - host_calls: operators, annotations and Python frames, with self times; operator_calls: the same without Python
    - gpu_calls: kernels, copies and fills, each below the frames that launched it; work of CUDA graphs also below the
      operators that captured it, where those are known. Times of overlapping work add up
    - python_calls: Python frames in order of time, with self times
    - module_calls_on_host: calls of modules alone, with their self times; module_calls_on_gpu: the same with the GPU
      time launched in each call, nested calls excluded
    - sampled_lines: sampled Python by line, and below a line the reason why its thread waited; own values are samples
    - python_rows: Python frames below their recorded callers, without own values
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.arrays.intervals import containing
from kineto_trace.arrays.row_groups import sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Ints, Ints32
from kineto_trace.model.context import Context
from kineto_trace.model.line_counts import STATES
from kineto_trace.model.trace import NO_ROW, Table, Trace
from kineto_trace.structure.activity_links import calls, captured_ops, forward_backward, gpu
from kineto_trace.structure.activity_links import ops as ops_tree
from kineto_trace.structure.captured_graphs import op_paths
from kineto_trace.structure.event_arguments import argument_texts
from kineto_trace.structure.library_calls import functions_named
from kineto_trace.structure.module_calls import module_calls, module_name
from kineto_trace.structure.nesting import KINDS, EventTree, Nested, build, levels, stack_numbers
from kineto_trace.structure.python_frames import IDLE, WAITING, LineSamples, line_samples, python_tree, state_counts

NO_LAUNCH = "launch not in the trace"
GIL = "waiting for the GIL"
IDLING = "idle"
IDLE_FOR = ("idle_sleep", "idle_lock", "idle_poll", "idle_io", "idle_child", "idle_driver", "idle_memory")
_COLUMNS = 7
NO_STACK = -1
SEPARATOR = ";"
ARGUMENT = "Call stack"
_BACKWARD = re.compile(r"(?:^|/)torch/autograd/[^:]*: (backward|_engine_run_backward|grad)$")


class StackKind(IntEnum):
    """What a node represents."""

    THREAD = 0
    FUNCTION = 1  # or a line of it
    ANNOTATION = 2
    OPERATOR = 3
    GPU = 4
    WAITING = 5  # for the GIL
    IDLE = 6
    MODULE = 7


_EVENTS = {
    "python_function": StackKind.FUNCTION,
    "user_annotation": StackKind.ANNOTATION,
    "cpu_op": StackKind.OPERATOR,
}


@dataclass(frozen=True, slots=True)
class CallForest:
    """One value per node.

    parent: place of the caller, or NOTHING.
    frame: number into `frames`.
    kind: StackKind.
    own: ns or samples of the node itself.
    thread: id, or NOTHING if unknown.
    start, end: Unix ns; of GPU work the moment of its launch, of lines those of their function, of threads 0.
    depth: number of callers.
    """

    parent: Ints
    frame: Ints
    kind: Ints
    own: Ints
    thread: Ints
    start: Ints
    end: Ints
    depth: Ints
    frames: list[str]

    def __len__(self) -> int:
        return len(self.parent)


class _Nodes:
    """Collects the nodes of a forest: threads first, callers before callees."""

    def __init__(self, trace: Trace) -> None:
        self._names = trace.target.threads
        self._frames = list(trace.strings)  # frames 0 … are the strings of the trace
        self._parts: list[list[Ints]] = [[np.empty(0, np.int64)] * _COLUMNS]
        self._depths: list[Ints] = [np.empty(0, np.int64)]
        self._extra = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._size = 0
        self._ids = np.empty(0, np.int64)

    def frame(self, text: str) -> int:
        """Adds a frame that is not a name of the trace, and returns its number."""
        self._frames.append(text)
        return len(self._frames) - 1

    def add(
        self,
        parent: Ints,
        frame: AnyArray,
        kind: int | AnyArray,
        *,
        own: AnyArray | int = 0,
        thread: AnyArray | int = NOTHING,
        start: AnyArray | int = 0,
        end: AnyArray | int | None = None,
        depth: AnyArray | None = None,
    ) -> Ints:
        """Adds nodes and returns their places. end: the start if omitted. depth: needed if callers are new, too."""
        count = len(parent)
        below = self._below(parent) if depth is None else depth.astype(np.int64)
        self._depths.append(below)
        columns = parent, frame, kind, own, thread, start, start if end is None else end
        self._parts.append([np.broadcast_to(np.asarray(column, np.int64), count) for column in columns])
        self._size += count
        return np.arange(self._size - count, self._size)

    def add_threads(self, ids: AnyArray) -> None:
        """Adds a node for each thread, before all others."""
        self._ids = unique_values(ids.astype(np.int64))
        frames = [self.frame(self._thread_name(tid)) for tid in self._ids.tolist()]
        self.add(np.full(len(frames), NOTHING), np.array(frames, np.int64), StackKind.THREAD, thread=self._ids)

    def thread_places(self, ids: AnyArray) -> Ints:
        """Returns the node of each thread."""
        return np.searchsorted(self._ids, ids)

    def add_events(self, trace: Trace, tree: EventTree, own: AnyArray) -> Ints:
        """Adds the events of a tree and returns their places."""
        frame, kind = np.zeros(len(tree), np.int64), np.zeros(len(tree), np.int64)
        for number, name in enumerate(KINDS):
            mine = np.flatnonzero(tree.kind == number)
            frame[mine], kind[mine] = trace.table(name)["name"][tree.row[mine]], _EVENTS[name]
        parent = np.where(
            tree.parent == NO_ROW, self.thread_places(tree.thread), tree.parent.astype(np.int64) + self._size
        )
        times: dict[str, AnyArray] = {"thread": tree.thread, "start": tree.start, "end": tree.end}
        return self.add(parent, frame, kind, own=own, depth=tree.depth + 1, **times)

    def add_rows(self, table: Table) -> Ints:
        """Adds the rows of python_function below their recorded callers and returns their places."""
        above = _without_cycles(table["parent"].astype(np.int64))
        parent = np.where(above == NO_ROW, self.thread_places(table["thread"]), above + self._size)
        times = {"thread": table["thread"], "start": table["start"], "end": table.end(), "depth": _depths(above) + 1}
        return self.add(parent, table["name"], StackKind.FUNCTION, **times)

    def add_samples(self, parent: Ints, frame: Ints, kind: int, own: AnyArray, table: Table, row: Ints) -> Ints:
        """Adds the samples in these rows of python_function and returns the places."""
        times = {"thread": table["thread"][row], "start": table["start"][row], "end": table.end()[row]}
        return self.add(parent, frame, kind, own=own, **times)

    def add_own(self, places: Ints, row: Ints, own: AnyArray) -> None:
        """Adds to the own values of existing nodes: of places[row] each."""
        self._extra = places[row], own

    def forest(self) -> CallForest:
        """Returns the collected forest."""
        parent, frame, kind, own, thread, start, end = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        np.add.at(own, *self._extra)
        return CallForest(parent, frame, kind, own, thread, start, end, np.concatenate(self._depths), self._frames)

    def _below(self, parent: Ints) -> Ints:
        """Returns the depth of these nodes' callees."""
        self._depths = [np.concatenate(self._depths)]
        return np.append(self._depths[0], -1)[parent] + 1

    def _thread_name(self, tid: int) -> str:
        name = self._names.get(tid, "")
        return f"thread {tid} ({name})" if name else f"thread {tid}"


@dataclass(frozen=True, slots=True)
class Stacks:
    """Distinct stacks, callers before callees.

    parent: place of the stack without its innermost frame, or NOTHING.
    frame: the innermost frame, a number into `frames`.
    kind: StackKind of that frame.
    weight: the stack's own weight, in ns or samples.
    depth: number of callers.
    """

    parent: Ints
    frame: Ints
    kind: Ints
    weight: Ints
    depth: Ints
    frames: Sequence[str]

    def __len__(self) -> int:
        return len(self.parent)


def host_calls(context: Context) -> CallForest:
    """Returns operators, annotations and Python frames, with self times in ns."""
    tree = context.get(event_tree)
    return _of_tree(context, tree)


def operator_calls(context: Context) -> CallForest:
    """Returns operators and annotations, with self times in ns."""
    return _of_tree(context, build(_only(context.trace, "user_annotation", "cpu_op"), context.trace.window_end_ns))


def python_calls(context: Context) -> CallForest:
    """Returns Python frames in order of time, with self times in ns.

    Sampled ones that were off the CPU, or waited for the GIL, in most of their own samples have that kind.
    """
    trace, period = context.trace, context.trace.sample_period_ns or 1
    tree = build(_only(trace, "python_function"), trace.window_end_ns, sample_period_ns=period)
    counts = state_counts(trace.table("python_function"))[tree.row]
    most = 2 * counts > counts.sum(axis=1, keepdims=True)
    kind = np.select([most[:, IDLE], most[:, WAITING]], [StackKind.IDLE, StackKind.WAITING], StackKind.FUNCTION)
    forest = _of_tree(context, tree)
    return replace(forest, kind=np.append(forest.kind[: len(forest) - len(tree)], kind))


def gpu_calls(context: Context) -> CallForest:
    """Returns GPU activities, in ns, below the frames that launched them, which have no time themselves."""
    work, called = context.get(gpu), context.get(calls)
    nodes = _Nodes(context.trace)
    if not len(work):
        return nodes.forest()
    tree = context.get(event_tree)
    known = np.flatnonzero(work.call >= 0)
    call = work.call[known]
    thread, moment = np.full(len(work), NOTHING), work.start.copy()
    thread[known], moment[known] = called.thread[call], called.start[call]
    above = np.full(len(work), NOTHING)
    nodes.add_threads(np.append(tree.thread, thread[known]))
    above[known] = nodes.thread_places(thread[known])
    placed = nodes.add_events(context.trace, tree, np.zeros(len(tree), np.int64))
    inner = np.full(len(work), NO_ROW, np.int64)
    inner[known] = tree.innermost(thread[known], moment[known])
    by_op = np.flatnonzero((inner == NO_ROW) & (work.op >= 0))
    inner[by_op] = tree.nodes_of("cpu_op", len(context.trace.table("cpu_op")))[work.op[by_op]]
    inside = np.flatnonzero(inner >= 0)
    above[inside] = placed[inner[inside]]
    lost = np.flatnonzero(above < 0)
    if len(lost):
        above[lost] = nodes.add(np.full(1, NOTHING), np.array([nodes.frame(NO_LAUNCH)]), StackKind.THREAD)
    for part, names in _captured(context):
        above[part] = nodes.add(above[part], names, StackKind.OPERATOR, thread=thread[part], start=moment[part])
    nodes.add(above, work.name, StackKind.GPU, own=work.end - work.start, thread=thread, start=moment)
    return nodes.forest()


def _captured(context: Context) -> Iterator[tuple[Ints, Ints]]:
    """Yields, level by level, the GPU activities with known captured operators, and these operators' names."""
    operator, paths = context.get(captured_ops), context.get(op_paths)
    for level in range(max(map(len, paths), default=0)):
        names = np.array([path[level] if level < len(path) else NO_ROW for path in paths] + [NO_ROW], np.int64)
        deep = np.flatnonzero(names[operator] != NO_ROW)
        yield deep, names[operator[deep]]


def module_calls_on_host(context: Context) -> CallForest:
    """Returns calls of modules, with self times in ns, nested modules excluded."""
    found = context.get(module_calls)
    length = found.end - found.start
    inside = np.flatnonzero(found.parent >= 0)
    return _of_modules(context, length - sums(found.parent[inside], length[inside], len(found)).astype(np.int64))


def module_calls_on_gpu(context: Context, cut: tuple[int, int] | None = None) -> tuple[CallForest, int]:
    """Returns calls of modules with the GPU time (ns) launched in each, and the GPU time of all other work.

    cut: only work that was launched between these moments (Unix ns) counts.
    """
    found, work, called = context.get(module_calls), context.get(gpu), context.get(calls)
    took = work.end - work.start
    if cut:
        known = work.call >= 0
        moment = work.start.copy()
        moment[known] = called.start[work.call[known]]
        took = np.where((moment >= cut[0]) & (moment < cut[1]), took, 0)
    inside = found.activity >= 0
    own = sums(found.activity[inside], took[inside], len(found)).astype(np.int64)
    return _of_modules(context, own), int(took[~inside].sum())


def _of_modules(context: Context, own: Ints) -> CallForest:
    found, nodes = context.get(module_calls), _Nodes(context.trace)
    nodes.add_threads(found.thread)
    first = len(unique_values(found.thread))
    parent = np.where(found.parent >= 0, found.parent + first, nodes.thread_places(found.thread))
    times = {"thread": found.thread, "start": found.start, "end": found.end, "depth": found.depth + 1}
    nodes.add(parent, found.name, StackKind.MODULE, own=own, **times)
    forest = nodes.forest()
    return replace(forest, frames=[module_name(text) for text in forest.frames])


def sampled_lines(context: Context) -> CallForest:
    """Returns sampled Python frames with their lines below them, and below a line the reason for waiting."""
    table = context.trace.table("python_function")
    nodes = _Nodes(context.trace)
    if not table["samples"].any():
        return nodes.forest()
    nodes.add_threads(table["thread"])
    rows = nodes.add_rows(table)
    found = line_samples(context.trace)
    leaf = _lines(nodes, rows, table, found)
    idle = _idle_names(nodes, table, found)
    for state, frame, kind in (
        (WAITING, np.full(len(leaf), nodes.frame(GIL)), StackKind.WAITING),
        (IDLE, idle, StackKind.IDLE),
    ):
        seen = np.flatnonzero(found.counts[:, state])
        nodes.add_samples(leaf[seen], frame[seen], kind, found.counts[seen, state], table, found.row[seen])
    return nodes.forest()


def python_rows(context: Context) -> tuple[CallForest, Ints]:
    """Returns the rows of python_function below their recorded callers, and the place of each row's node."""
    table = context.trace.table("python_function")
    nodes = _Nodes(context.trace)
    nodes.add_threads(table["thread"])
    places = nodes.add_rows(table)
    return nodes.forest(), places


def _lines(nodes: "_Nodes", rows: Ints, table: Table, found: LineSamples) -> Ints:
    """Adds the lines. Returns the place of each line, or of its function if the line is unknown."""
    numbers, number = np.unique(found.line, return_inverse=True)
    frame = np.array([nodes.frame(f"line {line}") for line in numbers.tolist()], np.int64)[number.reshape(-1)]
    leaf = rows[found.row]
    known = np.flatnonzero(found.line > 0)
    leaf[known] = nodes.add_samples(
        leaf[known], frame[known], StackKind.FUNCTION, found.busy[known], table, found.row[known]
    )
    nodes.add_own(rows, found.row, np.where(found.line > 0, 0, found.busy))
    return leaf


def _idle_names(nodes: "_Nodes", table: Table, found: LineSamples) -> Ints:
    """Returns the frame of the idle samples of each line, with the reason if it was the same in all of its
    function's.
    """
    idle = table[STATES[IDLE]].astype(np.int64)
    frame = np.full(len(table), nodes.frame(IDLING))
    for wait in IDLE_FOR:
        only = (table[wait] > 0) & (table[wait] == idle)
        frame[only] = nodes.frame(f"{IDLING}: {wait.removeprefix('idle_')}")
    return frame[found.row]


def event_tree(context: Context) -> EventTree:
    """Returns the tree of ops, annotations and Python frames of the trace."""
    trace = context.trace
    return build(trace.tables, trace.window_end_ns, sample_period_ns=trace.sample_period_ns)


def _only(trace: Trace, *kinds: str) -> Mapping[str, Table]:
    return {kind: trace.tables[kind] for kind in kinds if kind in trace.tables}


def _of_tree(context: Context, tree: EventTree) -> CallForest:
    nodes = _Nodes(context.trace)
    nodes.add_threads(tree.thread)
    nodes.add_events(context.trace, tree, tree.self_ns)
    return nodes.forest()


def _depths(parent: Ints) -> Ints:
    """Returns the number of callers of each node, by doubling the distance that is looked up."""
    above, depth = np.append(parent, NOTHING), np.append(parent >= 0, False).astype(np.int64)
    while (above >= 0).any():
        depth += depth[above]
        above = above[above]
    return depth[:-1]


def _without_cycles(parent: Ints) -> Ints:
    """Returns the callers, none for rows with cyclic callers: a file may contain anything."""
    above = np.append(parent, NOTHING)
    for _ in range(len(parent).bit_length() + 1):
        above = above[above]
    return np.where(above[:-1] >= 0, NOTHING, parent)


def merged(forest: CallForest) -> Stacks:
    """Returns the stacks of a forest with the sums of their own values."""
    stack, parent, frame = stack_numbers(forest.parent, forest.frame, forest.depth)
    kind, weight, depth = (np.zeros(len(parent), np.int64) for _ in range(3))
    kind[stack], depth[stack] = forest.kind, forest.depth
    np.add.at(weight, stack, forest.own)
    return Stacks(parent, frame, kind, weight, depth, forest.frames)


# The Python call stack of each operator.
#
# Theory of operation
# A file may contain the stack itself ("Call stack" of the operator's arguments: frames from the innermost to the
# outermost, separated by ";"). Otherwise the stack consists of the Python frames (python_function) that were running
# on the operator's thread when it started, written in the same way.
#
# Backward operators run on threads of autograd's own, without Python frames. They have the stack of the forward
# operator whose gradient they compute, which shows their origin in the user's code; so have the operators inside
# them. Those without a forward operator (accumulating gradients, say) have the stack of the call that started the
# backward pass, on the thread that was waiting for it. This applies only to threads without any Python frames: the
# thread's own frames take precedence.
#
# Stacks are numbered: a frame's stack is its own name and its caller's stack. All frames of one depth are
# numbered at once, so that nothing is done per frame, and texts are made on request.


@dataclass(frozen=True, slots=True)
class CallStacks:
    """The stacks of operators.

    of_op: per row of cpu_op the number of its stack, or NO_STACK.
    texts: of the stacks, if the file contains them.

    Otherwise stack n is the frame called names[n] (number into Trace.strings), called by stack callers[n].
    """

    of_op: Ints
    names: Ints
    callers: Ints
    texts: tuple[str, ...]

    def text(self, trace: Trace, number: int) -> str | None:
        """Returns the frames of a stack, innermost first, separated by ";"; None for NO_STACK."""
        if number == NO_STACK:
            return None
        if self.texts:
            return self.texts[number]
        frames = []
        while number != NO_STACK:
            frames.append(trace.strings[int(self.names[number])])
            number = int(self.callers[number])
        return SEPARATOR.join(frames)


def recorded_stacks(context: Context) -> CallStacks:
    """Returns the stacks recorded in the file."""
    numbers, texts = argument_texts(context, "cpu_op", ARGUMENT)
    known = np.array([bool(text) for text in texts] + [False])
    nothing = np.empty(0, np.int64)
    return CallStacks(np.where(known[numbers], numbers, NO_STACK), nothing, nothing, tuple(texts))


def call_stacks(context: Context) -> CallStacks:
    """Returns the stacks recorded in the file, or if there are none, those of the Python frames."""
    told = context.get(recorded_stacks)
    if (told.of_op != NO_STACK).any():
        return replace(told, of_op=_of_forward_ops(context, told.of_op))
    ops, python = context.trace.table("cpu_op"), context.trace.table("python_function")
    nested = context.get(python_tree)
    name = python["name"][nested.order]
    found, callers, names = stack_numbers(nested.tree.parent, name, nested.tree.depth)
    stack = np.append(found, NO_STACK)  # the last one is for "no caller"
    inside = nested.innermost(ops["thread"], ops["start"])
    of_op = _of_forward_ops(context, stack[inside])
    missing = np.flatnonzero((of_op == NO_STACK) & ~np.isin(ops["thread"], unique_values(python["thread"])))
    of_op[missing] = stack[_waiting_for_backward(context, nested, name, ops["start"][missing])]
    return CallStacks(of_op, names, callers, ())


def _of_forward_ops(context: Context, of_op: Ints) -> Ints:
    """Returns the stacks of operators; those inside backward operators have that of the forward operator."""
    links = forward_backward(context.trace.tables)
    if not len(links.backward_rows):
        return of_op.copy()
    table, tree = context.trace.table("cpu_op"), context.get(ops_tree)
    own = of_op.copy()
    own[links.backward_rows] = np.where(
        own[links.backward_rows] == NO_STACK, of_op[links.forward_rows], own[links.backward_rows]
    )
    # autograd's operators around a backward operator
    around = np.flatnonzero((table["forward_thread"] > 0) & (own == NO_STACK))
    key = table["forward_thread"].astype(np.uint64) << np.uint64(40) ^ table["sequence"].astype(np.uint64)
    own[around] = lookup(key[around], key[links.backward_rows], own[links.backward_rows], NO_STACK)
    sorted_own, parent, depth = own[tree.row], tree.nested.tree.parent, tree.nested.tree.depth
    for at in list(levels(depth))[1:]:
        places = at[sorted_own[at] == NO_STACK]
        sorted_own[places] = sorted_own[parent[places]]
    own[tree.row] = sorted_own
    return own


def _waiting_for_backward(context: Context, nested: Nested, name: Ints32, time: Ints) -> Ints:
    """Returns for each time the innermost Python frame of the thread that runs a backward pass then; -1: none.

    nested: the Python frames.
    name: of each of them, by place.
    """
    passes = np.flatnonzero(functions_named(context, _BACKWARD)[name])
    if not len(passes) or not len(time):
        return np.full(len(time), -1, np.int64)
    passes = passes[np.argsort(nested.events.start[passes], kind="stable")]
    begin, end = nested.events.start[passes], nested.tree.end[passes]
    at = containing(begin, end, time)
    running = at >= 0
    found = np.full(len(time), -1, np.int64)
    found[running] = nested.innermost(nested.events.track[passes[at[running]]], time[running])
    return found
