"""The view of merged stacks, and the flame graph of one trace."""

from typing import Any

import numpy as np

from kineto_trace.analysis.flame.flame_folding import OTHERS, folded, keys
from kineto_trace.analysis.flame.flame_nodes import NS, FlameNode
from kineto_trace.analysis.flame.flame_profiles import FlameChoice, FlameSubject, merged_profile
from kineto_trace.analysis.flame.flame_trees import ROOT, FlameTree, Ints, merged_tree
from kineto_trace.model.context import Context
from kineto_trace.structure.module_calls import NO_MODULES
from kineto_trace.structure.stacks.call_forests import StackKind
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NS_PER_US = 1e3
NOTHING_OF = {
    FlameSubject.PYTHON: "the trace has no Python calls and no samples of Python stacks",
    FlameSubject.OPS: "the trace has no operators and no annotations",
    FlameSubject.KERNELS: "the trace has no GPU work",
    FlameSubject.MODULES: NO_MODULES,
    FlameSubject.MODULES_GPU: f"no GPU work was launched in modules; if there are none: {NO_MODULES}",
}


@view(
    "flame_graph",
    columns(
        ("stack", "texts", "", "frames from the outermost to the innermost one; the first is the thread"),
        ("name", "text", "", "the innermost frame: operator, annotation, Python function, line, module or kernel"),
        ("kind", "text", "", "what it is: function, annotation, operator, module, gpu, waiting (for the GIL) or idle"),
        ("self_us", "float", "us", "time in which the stack was exactly this; missing if only samples are known"),
        ("self_pct", "float", "%", "share of the time or samples of all stacks"),
        ("samples", "int", "", "samples with exactly this stack, if the time between two samples is not known"),
        ("stacks", "int", "", "number of stacks that the row stands for"),
    ),
)
def flame_graph(
    context: Context,
    *,
    of: FlameSubject = FlameSubject.OPS,
    thread: int | None = None,
    step: int | None = None,
    idle: bool = False,
    least: float = 0.0,
) -> Answer:
    """Merged stacks, as flame graphs draw them: equal stacks form one row, and those with most time come first.

    Time is counted once: what a frame called is in the rows of these stacks. So the rows sum to 100 %. All training
    steps have one name, "ProfilerStep".

    Options:
    - of: "ops" for operators and annotations by their time on the host; "python" for Python functions, by samples and
      line where stacks were sampled, otherwise by the time of calls; "kernels" for GPU work below the frames that
      launched it; "modules" for modules by their time on the host, "modules_gpu" by the GPU time launched in them.
    - thread: id of the only thread of interest; of kernels, the one that launched them.
    - step: number of the only step of interest (N of ProfilerStep#N); kernels count by their launch.
    - idle: count samples in which a thread was idle, too.
    - least: stacks with less than this share (in %) are one row together.
    """
    choice = FlameChoice(of=FlameSubject(of), thread=thread, step=step, idle=idle)
    profile = merged_profile(context, choice)
    tree = merged_tree([profile.calls])
    whole = int(tree.total[ROOT])
    shown = np.flatnonzero((tree.own > 0) & (tree.own * 100 >= least * whole))
    shown = shown[np.argsort(-tree.own[shown], kind="stable")]
    others = np.flatnonzero((tree.own > 0) & (tree.own * 100 < least * whole))
    values = _values(tree, shown, tree.own[shown], profile.unit)
    if len(others):
        rest = _values(tree, others[:1], tree.own[others].sum(keepdims=True), profile.unit)
        rest |= {"stack": [[OTHERS]], "name": [OTHERS], "kind": [None], "stacks": [len(others)]}
        values = {name: [*column, *rest[name]] for name, column in values.items()}
    return Answer(values, profile.notes if whole else [*profile.notes, NOTHING_OF[choice.of]])


def flame_root(context: Context, choice: FlameChoice) -> tuple[FlameNode, str]:
    """Returns the flame graph of one trace, with merged stacks and no more frames than fit on a page, and its unit.

    Raises ViewError for a step that is not in the trace.
    """
    profile = merged_profile(context, choice)
    tree = merged_tree([profile.calls])
    return folded(tree, keys(tree)), profile.unit


def _values(tree: FlameTree, places: Ints, own: Ints, unit: str) -> dict[str, Any]:
    whole = max(int(tree.total[ROOT]), 1)
    nothing = [None] * len(places)
    return {
        "stack": [_stack(tree, place) for place in places.tolist()],
        "name": [tree.name(place) for place in places.tolist()],
        "kind": [StackKind(kind).name.lower() for kind in tree.kind[places].tolist()],
        "self_us": (own / NS_PER_US).tolist() if unit == NS else nothing,
        "self_pct": (100 * own / whole).tolist(),
        "samples": nothing if unit == NS else own.tolist(),
        "stacks": [1] * len(places),
    }


def _stack(tree: FlameTree, place: int) -> list[str]:
    names = []
    while place != ROOT:
        names.append(tree.name(place))
        place = int(tree.parent[place])
    return names[::-1]
