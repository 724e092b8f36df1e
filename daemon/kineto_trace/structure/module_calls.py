"""Calls of modules (nn.Module, or modules of PyTorch Lightning): how they nest, what they ran and launched.

Theory of operation
    A call of a module is a Python function with a module number, or in traces of PyTorch Lightning an operator called
    "[pl][module]<class>: <name>". Calls nest by thread and time. An operator belongs to the innermost module that runs
    when it starts; a GPU activity to the one that runs when its call is made.

    A backward operator ("autograd::engine::evaluate_function: …") belongs to the module of the forward operator to
    which the operator in it is linked; one that accumulates gradients to the same module as the one before it on its
    thread.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Events
from kineto_trace.arrays.row_groups import group
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_MODULE, Trace
from kineto_trace.structure.activity_links import calls, gpu, ops
from kineto_trace.structure.fwd_bwd import EVALUATE_FUNCTION, forward_backward
from kineto_trace.structure.nesting import ends, nest

NOTHING = -1
TORCH_PREFIX = "nn.Module: "
LIGHTNING_MODULE = "[pl][module]"
NO_MODULES = "the trace has no calls of modules: record with with_modules=True or with_stack=True"
ACCUMULATE_GRAD = EVALUATE_FUNCTION + "torch::autograd::AccumulateGrad"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """Calls of modules in preorder, thread by thread. Times Unix ns.

    thread: id. module: the module's number (0 where it has none). parent: place of the call around it; NOTHING: none.
    depth: number of calls around it. stop: the place after the last call inside. path: number of its chain of names.
    op: per row of cpu_op the place of the innermost call, or NOTHING; activity: per GPU activity (parts.gpu) likewise.
    """

    name: npt.NDArray[np.int32]
    thread: Ints
    module: Ints
    start: Ints
    end: Ints
    parent: Ints
    depth: Ints
    stop: Ints
    path: Ints
    op: Ints
    activity: Ints

    def __len__(self) -> int:
        return len(self.name)


def module_name(text: str) -> str:
    """Returns what a module is called whose calls have this name: its class and number."""
    return text.removeprefix(TORCH_PREFIX).removeprefix(LIGHTNING_MODULE)


def is_lightning(trace: Trace) -> bool:
    """Tells whether the file says that PyTorch Lightning wrote it."""
    return trace.head is not None and trace.head.get("Framework") == '"pytorch-lightning"'


def shown_names(context: Context) -> tuple[str, ...]:
    """Returns for each string what an operator of that name is called: Lightning's modules have their names alone."""
    texts = context.trace.strings
    if not is_lightning(context.trace):
        return tuple(texts)
    return tuple(_lightning_name(text) if text.startswith(LIGHTNING_MODULE) else text for text in texts)


def _lightning_name(text: str) -> str:
    """The name of the module in "[pl][module]<type>: <name>"."""
    name = text.replace(LIGHTNING_MODULE, "")
    return name[name.find(": ") + 2 :]


def module_calls(context: Context) -> ModuleCalls:
    """Returns all calls of modules; may be empty."""
    trace = context.trace
    python, table = trace.table("python_function"), trace.table("cpu_op")
    lightning = np.array([text.startswith(LIGHTNING_MODULE) for text in trace.strings], np.bool_)
    called = np.flatnonzero((python["module"] != NO_MODULE) & (python["samples"] == 0))
    wrapped = np.flatnonzero(lightning[table["name"]]) if len(table) else np.empty(0, np.int64)
    joined = {
        name: np.concatenate([python[name][called], table[name][wrapped]]) for name in ("thread", "start", "name")
    }
    end = np.concatenate([python.end()[called], ends(table)[wrapped]])
    module = np.concatenate([python["module"][called], np.zeros(len(wrapped))]).astype(np.int64)
    nested = nest(Events(joined["thread"], joined["start"], end), trace.window_end_ns)
    tree, name = nested.tree, joined["name"][nested.order]
    activity, launched = context.get(gpu), context.get(calls)
    has_call = activity.call >= 0
    at = np.zeros(len(activity), np.int64)
    thread = np.zeros(len(activity), np.uint32)
    at[has_call], thread[has_call] = launched.start[activity.call[has_call]], launched.thread[activity.call[has_call]]
    by_op = ~has_call & (activity.op >= 0)
    at[by_op], thread[by_op] = table["start"][activity.op[by_op]], table["thread"][activity.op[by_op]]
    place = nested.innermost(thread, at).astype(np.int64)
    return ModuleCalls(
        name=name,
        thread=nested.events.track.astype(np.int64),
        module=module[nested.order],
        start=nested.events.start,
        end=tree.end,
        parent=tree.parent.astype(np.int64),
        depth=tree.depth.astype(np.int64),
        stop=tree.stop.astype(np.int64),
        path=paths(tree.parent, tree.depth, name),
        op=nested.innermost(table["thread"], table["start"]).astype(np.int64),
        activity=np.where(has_call | by_op, place, NOTHING),
    )


def paths(parent: npt.NDArray[np.int32], depth: npt.NDArray[np.int32], name: npt.NDArray[Any]) -> Ints:
    """For each node of a tree a number that equal chains of names share: from 0 on, outer ones before inner ones."""
    path = np.full(len(parent) + 1, NOTHING, np.int64)  # the last one is for "no parent"
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=-1)) + 2))
    count = 0
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        nodes = by_depth[first:last]
        groups = group([path[parent[nodes]], name[nodes]])
        path[nodes] = groups.number + count
        count += len(groups)
    return path[:-1]


def backward_roots(context: Context) -> tuple[Ints, Ints]:
    """Returns rows of cpu_op that run a module's backward pass, and the row of the forward operator of each."""
    trace, tree = context.trace, context.get(ops)
    table = trace.table("cpu_op")
    links = forward_backward(trace.tables)
    if not len(links.backward_rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    evaluates = np.array([text.startswith(EVALUATE_FUNCTION) for text in trace.strings], np.bool_)[table["name"]]
    accumulates = np.array([text == ACCUMULATE_GRAD for text in trace.strings], np.bool_)[table["name"]]
    parent = tree.nested.tree.parent
    above = parent[tree.place[links.backward_rows]]
    outer = np.where(above >= 0, tree.row[above], NOTHING)
    root = np.where((outer >= 0) & evaluates[outer], outer, links.backward_rows)
    forward = np.full(len(table), NOTHING, np.int64)
    forward[root] = links.forward_rows
    # In the order of threads and starts: what accumulates gradients follows what it belongs to.
    rows = tree.row[(evaluates | (forward >= 0))[tree.row]]
    opens = ~accumulates[rows]
    opens[:1] = True
    opens[1:] |= table["thread"][rows][1:] != table["thread"][rows][:-1]
    before = np.maximum.accumulate(np.where(opens, np.arange(len(rows)), 0))
    found = np.where(accumulates[rows], forward[rows[before]], forward[rows])
    return rows[found >= 0], found[found >= 0]
