"""The views of CUDA graphs: what their launches ran, for how long, who launched them, and for which operators."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from kineto_trace.analysis.host_time.operator_views import SHAPES
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import Groups, group, sums
from kineto_trace.base.array_types import NOTHING, Ints
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import GPU_TABLES, NO_STRING
from kineto_trace.structure.activity_links import KERNEL, calls, captured_ops, gpu, launch_owners
from kineto_trace.structure.captured_graphs import KNOWN, captured_graphs, op_paths
from kineto_trace.structure.event_arguments import parse
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_NO_GRAPHS = "no CUDA graph was launched while the trace was recorded"
_OPS_UNKNOWN = (
    "the operators of a graph's kernels are known only if the agent saw the graph being captured; otherwise, the "
    "kernels count for the operator or annotation that launched the graph"
)
_NO_IDS = "the trace does not record which graph was launched: launches that ran the same kernels count as one graph"
_NO_IDS_NO_OPS = "launches whose graph was not recorded are missing: their operators are unknown"


@dataclass(frozen=True, slots=True)
class GraphLaunches:
    """Launches of CUDA graphs.

    nodes: rows of Gpu that belong to one.
    launch: the number of each node's launch.
    graph: of each launch, the graph's id, 0 if it is not recorded.
    first: of each launch, its first place in `nodes`.
    """

    nodes: Ints
    launch: Ints
    graph: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.first)


def graph_launches(context: Context) -> GraphLaunches:
    """Returns the launches whose GPU activities the trace has.

    An activity belongs to a graph if its record names one, or if the call that caused it launches graphs. All
    activities of one launch have its correlation id.
    """
    activity, called = context.get(gpu), context.get(calls)
    graph = np.zeros(len(activity), np.int64)
    for kind, name in enumerate(GPU_TABLES):
        table, mine = context.trace.table(name), activity.kind == kind
        if "graph_id" in table.columns:
            graph[mine] = table["graph_id"][activity.row[mine]]
    launches = np.append(matches(context.trace.strings, _LAUNCH)[called.name], False)
    nodes = np.flatnonzero((graph != 0) | launches[activity.call])
    found = group([activity.correlation[nodes], graph[nodes]])
    return GraphLaunches(nodes, found.number, graph[nodes[found.first]], found.first)


@view(
    "cuda_graphs",
    columns(
        ("graph", "int", "", "CUPTI's id of the graph; missing if not recorded"),
        ("device", "int", "", "GPU index in the process"),
        (
            "launched_by",
            "text",
            "",
            "operator or, failing that, annotation around the launches; missing if there is neither",
        ),
        ("launches", "int", "", "launches whose work is in the trace"),
        ("kernels", "float", "", "kernels per launch"),
        ("copies_and_fills", "float", "", "copies and fills per launch"),
        ("call_us", "float", "us", "mean duration of the launching call; missing if no call was recorded"),
        ("gpu_us", "float", "us", "sum of the durations of its work per launch"),
        ("span_us", "float", "us", "mean time from the start of its first activity to the end of its last"),
        ("total_us", "float", "us", "sum of the durations of its work over all launches"),
        ("share_pct", "float", "%", "share of the total duration of all GPU activities"),
        ("top_kernel", "text", "", "name of the kernel that took the most time"),
        ("operators", "text", "", "whether the operators of its kernels are known from its capture, and if not, why"),
        ("operators_pct", "float", "%", "share of its GPU time whose operators are known from its capture"),
    ),
)
def cuda_graphs(context: Context) -> Answer:
    """The CUDA graphs that were launched, longest total GPU time first.

    A launch runs everything that was captured into the graph, with one call. Launches of one graph from different
    operators have separate rows. A graph is identified by its id; in traces without such ids, launches are grouped by
    the kernels that they ran. The view `graph_operators` lists the operators whose work was captured.
    """
    found = context.get(graph_launches)
    rows = _rows_of(context, found)
    values = _figures(context, found, rows)
    order = np.argsort(-np.asarray(values["total_us"]), kind="stable").tolist()
    notes = [] if len(rows) else [_NO_GRAPHS]
    if any(text != KNOWN for text in values["operators"]):
        notes.append(_OPS_UNKNOWN)
    if not found.graph.all():
        notes.append(_NO_IDS)
    return Answer({name: [column[row] for row in order] for name, column in values.items()}, notes)


def _rows_of(context: Context, found: GraphLaunches) -> Groups:
    """Groups the launches by row of the view."""
    activity = context.get(gpu)
    lead = found.nodes[found.first]
    ran = np.zeros(len(found), np.uint64)  # identifies the work of a launch without an id, whatever the order
    np.add.at(ran, found.launch, (activity.name[found.nodes].astype(np.uint64) + np.uint64(1)) * _MIX)
    ran[found.graph != 0] = 0
    return group([found.graph, ran.view(np.int64), activity.device[lead], context.get(launch_owners)[lead]])


def _figures(context: Context, found: GraphLaunches, rows: Groups) -> dict[str, list[Any]]:
    """Returns the columns of the view, in the order of `rows`."""
    activity, strings, count = context.get(gpu), context.trace.strings, len(rows)
    nodes, row = found.nodes, rows.number[found.launch]
    launches, first = rows.sizes(), found.nodes[found.first[rows.first]]
    took = activity.end[nodes] - activity.start[nodes]
    total, known = sums(row, took, count), context.get(captured_ops)[nodes] != NOTHING
    kernels = np.bincount(row, weights=activity.kind[nodes] == KERNEL, minlength=count)
    begin, end = np.full(len(found), np.iinfo(np.int64).max), np.full(len(found), np.iinfo(np.int64).min)
    np.minimum.at(begin, found.launch, activity.start[nodes])
    np.maximum.at(end, found.launch, activity.end[nodes])
    everything = int((activity.end - activity.start).sum())
    owner = context.get(launch_owners)[first].tolist()
    return {
        "graph": [number or None for number in found.graph[rows.first].tolist()],
        "device": activity.device[first].tolist(),
        "launched_by": [strings[number] if number != NOTHING else None for number in owner],
        "launches": launches.tolist(),
        "kernels": (kernels / launches).tolist(),
        "copies_and_fills": ((np.bincount(row, minlength=count) - kernels) / launches).tolist(),
        "call_us": _call_times(context, found, rows),
        "gpu_us": (total / launches / 1000).tolist(),
        "span_us": (sums(rows.number, end - begin, count) / launches / 1000).tolist(),
        "total_us": (total / 1000).tolist(),
        "share_pct": (100 * total / max(everything, 1)).tolist(),
        "top_kernel": _top_kernels(context, nodes, row, took, count),
        "operators": [_state(context, number) for number in found.graph[rows.first].tolist()],
        "operators_pct": (100 * sums(row, took * known, count) / np.maximum(total, 1)).tolist(),
    }


def _state(context: Context, graph: int) -> str | None:
    """Returns the status of a graph's operators; None if the trace has no ids of graphs."""
    return context.get(captured_graphs).state.get(graph)


def _call_times(context: Context, found: GraphLaunches, rows: Groups) -> list[float | None]:
    """Returns the mean length (us) of the calls that launched each row."""
    call = context.get(gpu).call[found.nodes[found.first]]
    called, known = context.get(calls), call != NOTHING
    took = (called.end - called.start)[call[known]]
    number = np.bincount(rows.number[known], minlength=len(rows))
    mean = sums(rows.number[known], took, len(rows)) / np.maximum(number, 1) / 1000
    return [value if some else None for value, some in zip(mean.tolist(), number.tolist(), strict=True)]


def _top_kernels(context: Context, nodes: Ints, row: Ints, took: Ints, count: int) -> list[str | None]:
    """Returns the name of the kernel with the most time in each row."""
    activity = context.get(gpu)
    own = activity.kind[nodes] == KERNEL
    pairs = group([row[own], activity.name[nodes[own]]])
    of_pair = np.flatnonzero(own)[pairs.first]
    order = np.argsort(pairs.sums(took[own]), kind="stable")  # the last one of each row wins
    top = np.full(count, NOTHING, np.int64)
    top[row[of_pair[order]]] = activity.name[nodes[of_pair[order]]]
    return [context.trace.strings[name] if name != NOTHING else None for name in top.tolist()]


@view(
    "graph_operators",
    columns(
        ("graph", "int", "", "CUPTI's id of the graph"),
        ("operator", "text", "", "operator that added the work when the graph was captured; missing if there was none"),
        (
            "path",
            "text",
            "",
            "operators and annotations around it at that time, outermost first, then the operator itself",
        ),
        ("input_shape", "text", "", "shapes of its inputs at that time; missing if unknown"),
        ("calls", "int", "", "calls of the operator in the capture"),
        ("launches", "int", "", "launches of the graph whose work is in the trace"),
        ("kernels", "float", "", "kernels per launch"),
        ("copies_and_fills", "float", "", "copies and fills per launch"),
        ("gpu_us", "float", "us", "sum of the durations of its work per launch"),
        ("total_us", "float", "us", "sum of the durations of its work over all launches"),
        ("share_pct", "float", "%", "share of the total duration of all work of CUDA graphs"),
        ("top_kernel", "text", "", "name of the kernel that took the most time"),
    ),
)
def graph_operators(context: Context) -> Answer:
    """What the operators in CUDA graphs cost, longest total GPU time first.

    A replay runs no operators: these are the operators that ran when the graph was captured, while the agent was in the
    process. Graphs whose capture the agent did not see are missing, with a note.
    """
    found, state = context.get(graph_launches), context.get(captured_graphs).state
    known = np.isin(found.graph, [number for number, text in state.items() if text == KNOWN])[found.launch]
    nodes, launch = found.nodes[known], found.launch[known]
    values = _operators(context, found, nodes, launch)
    order = np.argsort(-np.asarray(values["total_us"]), kind="stable").tolist()
    reasons = dict.fromkeys(text for text in state.values() if text != KNOWN)
    notes = [
        f"not shown: {sum(text == reason for text in state.values())} of {len(state)} CUDA graphs; "
        f"their operators are {reason}"
        for reason in reasons
    ]
    if not len(found):
        notes = [_NO_GRAPHS]
    if not found.graph.all():
        notes.append(_NO_IDS_NO_OPS)
    return Answer({name: [column[row] for row in order] for name, column in values.items()}, notes)


def _operators(context: Context, found: GraphLaunches, nodes: Ints, launch: Ints) -> dict[str, list[Any]]:
    """Returns the columns of the view for these nodes of launches."""
    activity, strings, ops = context.get(gpu), context.trace.strings, context.trace.table("graph_op")
    operator, graph = context.get(captured_ops)[nodes], found.graph[launch]
    paths, shapes = context.get(op_paths), context.get(captured_graphs).shapes
    texts = [" > ".join(strings[name] for name in path) for path in paths]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    path = np.append(np.array([numbers[text] for text in texts], np.int64), NOTHING)[operator]
    shape_texts, shape = _shapes(context)
    shape = np.where(np.isin(graph, list(shapes)), shape[operator], 0)
    rows = group([graph, path, shape])
    took, count = activity.end[nodes] - activity.start[nodes], len(rows)
    ids, launches_of = np.unique(found.graph[unique_values(launch)], return_counts=True)
    launches = launches_of[np.searchsorted(ids, graph[rows.first])]
    kernels = np.bincount(rows.number, weights=activity.kind[nodes] == KERNEL, minlength=count)
    total = rows.sums(took)
    first = operator[rows.first].tolist()
    calls_of = group([rows.number, operator])
    return {
        "graph": graph[rows.first].tolist(),
        "operator": [strings[ops["name"][row]] if row != NOTHING else None for row in first],
        "path": [texts[row] if row != NOTHING else None for row in first],
        "input_shape": [shape_texts[number] for number in shape[rows.first].tolist()],
        "calls": np.bincount(
            rows.number[calls_of.first[operator[calls_of.first] != NOTHING]], minlength=count
        ).tolist(),
        "launches": launches.tolist(),
        "kernels": (kernels / np.maximum(launches, 1)).tolist(),
        "copies_and_fills": ((rows.sizes() - kernels) / np.maximum(launches, 1)).tolist(),
        "gpu_us": (total / np.maximum(launches, 1) / 1000).tolist(),
        "total_us": (total / 1000).tolist(),
        "share_pct": (100 * total / max(int((activity.end - activity.start)[found.nodes].sum()), 1)).tolist(),
        "top_kernel": _top_kernels(context, nodes, rows.number, took, count),
    }


def _shapes(context: Context) -> tuple[list[str | None], Ints]:
    """Returns distinct texts of input shapes, None first, and the text of each row of graph_op; one more entry is for
    none.
    """
    strings, column = context.trace.strings, context.trace.table("graph_op")["inputs"]
    texts: dict[str | None, int] = {None: 0}
    places = {NO_STRING: 0}
    for number in unique_values(column).tolist():
        if number != NO_STRING:
            dims = parse(strings[number]).get(SHAPES[0])
            places[number] = 0 if dims is None else texts.setdefault(str(dims), len(texts))
    return list(texts), np.array([places[number] for number in [*column.tolist(), NO_STRING]], np.int64)
