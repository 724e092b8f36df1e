"""Calls of modules (nn.Module, or modules of PyTorch Lightning): their nesting, operators and GPU work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kineto_trace.arrays.codec import Events
from kineto_trace.base.array_types import NOTHING, Ints, Ints32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_MODULE, Trace
from kineto_trace.structure.activity_links import EVALUATE_FUNCTION, calls, forward_backward, gpu, ops
from kineto_trace.structure.nesting import ends, nest, stack_numbers

TORCH_PREFIX = "nn.Module: "
LIGHTNING_MODULE = "[pl][module]"
NO_MODULES = "the trace has no module calls: record it with with_modules=True or with_stack=True"
ACCUMULATE_GRAD = EVALUATE_FUNCTION + "torch::autograd::AccumulateGrad"
ELIDED = "…"  # in place of the outermost names of a chain that is too long
# Limit of the chains of all paths together, guaranteed size of one chain, and fixed cost of a name in a chain.
MOST_CHAINS_BYTES, LEAST_CHAIN_BYTES, NAME_BYTES = 1 << 28, 512, 8


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """Calls of modules in preorder, thread by thread. Times Unix ns.

    thread: id.
    module: the module's number (0 if it has none).
    parent: place of the enclosing call, or NOTHING.
    depth: number of enclosing calls.
    stop: the place after the last nested call.
    path: number of its chain of names, from 0 on, outer ones before inner ones.
    op: per row of cpu_op the place of the innermost call, or NOTHING.
    activity: per GPU activity (parts.gpu) the place of the innermost call, or NOTHING.
    first: per path the place of its first call.
    around: per path the enclosing path, a lower number, or NOTHING.
    """

    name: Ints32
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
    first: Ints
    around: Ints

    def __len__(self) -> int:
        return len(self.name)


def module_name(text: str) -> str:
    """Returns the name of a module whose calls have this name: its class and number."""
    return text.removeprefix(TORCH_PREFIX).removeprefix(LIGHTNING_MODULE)


def is_lightning(trace: Trace) -> bool:
    """Returns whether the file states that PyTorch Lightning wrote it."""
    return trace.head is not None and trace.head.get("Framework") == '"pytorch-lightning"'


def shown_names(context: Context) -> tuple[str, ...]:
    """Returns for each string the displayed name of its operator: of Lightning's modules, the name alone."""
    texts = context.trace.strings
    if not is_lightning(context.trace):
        return tuple(texts)
    return tuple(_lightning_name(text) if text.startswith(LIGHTNING_MODULE) else text for text in texts)


def _lightning_name(text: str) -> str:
    """Returns the name of the module in "[pl][module]<type>: <name>"."""
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
    path, around, _ = stack_numbers(tree.parent, name, tree.depth)
    return ModuleCalls(
        name=name,
        thread=nested.events.track.astype(np.int64),
        module=module[nested.order],
        start=nested.events.start,
        end=tree.end,
        parent=tree.parent.astype(np.int64),
        depth=tree.depth.astype(np.int64),
        stop=tree.stop.astype(np.int64),
        path=path,
        op=nested.innermost(table["thread"], table["start"]).astype(np.int64),
        activity=np.where(has_call | by_op, place, NOTHING),
        first=np.unique(path, return_index=True)[1],
        around=around,
    )


def chain_bytes(count: int) -> int:
    """Returns how many bytes each of so many chains may take."""
    return max(LEAST_CHAIN_BYTES, MOST_CHAINS_BYTES // max(count, 1))


def name_chains(above: Ints, names: Sequence[str]) -> list[list[str]]:
    """Returns for each path its names, outermost first. above: the enclosing path, a lower number, or NOTHING.

    The total memory is bounded, whatever a file nests: very long chains begin with ELIDED, and keep the inner names.
    """
    room = chain_bytes(len(names))
    chains: list[list[str]] = []
    sizes: list[int] = []
    for outer, name in zip(above.tolist(), names, strict=True):
        chain, size = ([], 0) if outer < 0 else (chains[outer].copy(), sizes[outer])
        chain.append(name)
        size += NAME_BYTES + len(name)
        dropped = 0
        while size > room and dropped + 1 < len(chain):
            size -= NAME_BYTES + len(chain[dropped])
            dropped += 1
        if dropped:
            chain[:dropped] = [ELIDED]
            size += NAME_BYTES + len(ELIDED)
        chains.append(chain)
        sizes.append(size)
    return chains


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
    # In the order of threads and starts: a gradient accumulation follows the operator it belongs to.
    rows = tree.row[(evaluates | (forward >= 0))[tree.row]]
    opens = ~accumulates[rows]
    opens[:1] = True
    opens[1:] |= table["thread"][rows][1:] != table["thread"][rows][:-1]
    before = np.maximum.accumulate(np.where(opens, np.arange(len(rows)), 0))
    found = np.where(accumulates[rows], forward[rows[before]], forward[rows])
    return rows[found >= 0], found[found >= 0]
