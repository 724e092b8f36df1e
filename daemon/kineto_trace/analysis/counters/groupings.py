"""Which groups the activities of GPUs belong to: kernels by name, operators, annotations, modules, phases of steps.

Every activity has a group, since samples see all of them: what belongs to no operator, say, is a group of its own.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.counters.attribution import DeviceCounters, Grouping, attribute
from kineto_trace.analysis.gpu_time.annotation_views import launch_annotations
from kineto_trace.analysis.host_time.step_phases import OTHER, STEP_PHASES, phase_times
from kineto_trace.arrays.intervals import NOTHING, containing
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, ops, owners, step_names
from kineto_trace.structure.module_calls import backward_roots, module_calls, module_name

PATHS = 1024  # of modules; deeper ones count for the module around them
OUTSIDE = "work outside of these"
FORWARD, BACKWARD = "forward", "backward"
PHASES = (*STEP_PHASES, OTHER)

Ints = npt.NDArray[np.int64]
Devices = tuple[DeviceCounters, ...]


def by_kernel(context: Context) -> Devices:
    """Returns the counters of kernels, copies and fills by name: groups are numbers of strings."""
    return attribute(context, Grouping(context.get(gpu).name.astype(np.int64), context.trace.strings))


def by_op(context: Context) -> Devices:
    """Returns the counters of operators: groups are numbers of strings, and behind these what has no operator."""
    return attribute(context, _named(context, context.get(owners)))


def by_annotation(context: Context) -> Devices:
    """Returns the counters of annotations as of operators. Steps are no annotations here."""
    name = context.get(launch_annotations)
    is_step = np.append(context.get(step_names), False)
    return attribute(context, _named(context, np.where(is_step[name], NOTHING, name)))


def _named(context: Context, name: Ints) -> Grouping:
    strings = context.trace.strings
    return Grouping(np.where(name >= 0, name, len(strings)), (*strings, OUTSIDE))


def by_phase(context: Context) -> Devices:
    """Returns the counters of the phases of steps by when their work was launched: groups are places in PHASES."""
    activity, called = context.get(gpu), context.get(calls)
    number = np.full(len(activity), PHASES.index(OTHER), np.int64)
    launched = np.flatnonzero(activity.call >= 0)
    moment = called.start[activity.call[launched]] if len(launched) else launched
    for place, times in reversed(list(enumerate(context.get(phase_times)))):
        number[launched[containing(times.start, times.end, moment) >= 0]] = place
    return attribute(context, Grouping(number, PHASES))


@dataclass(frozen=True, slots=True)
class ModuleCounters:
    """The counters of modules. path, name, depth: of each place; groups are places, those of the backward behind them.

    The last group is what belongs to no module.
    """

    path: tuple[str, ...]
    name: tuple[str, ...]
    depth: Ints
    devices: Devices


def by_module(context: Context) -> ModuleCounters:
    """Returns the counters of modules with those inside them, forward and backward apart."""
    found, activity = context.get(module_calls), context.get(gpu)
    count = int(found.path.max(initial=NOTHING)) + 1
    first = np.full(count, len(found), np.int64)
    np.minimum.at(first, found.path, np.arange(len(found)))
    parent = np.append(found.path, NOTHING)[found.parent[first]] if count else first
    depth = found.depth[first] if count else first
    deepest = next((limit for limit in range(int(depth.max(initial=0)), 0, -1)
                    if np.count_nonzero(depth <= limit) <= PATHS), 0)  # fmt: skip
    kept = int(np.count_nonzero(depth <= deepest))  # outer ones have lower numbers
    shown = np.arange(count)
    while (shown >= kept).any():
        shown = np.where(shown >= kept, parent[shown], shown)
    place = np.append(shown, NOTHING)[np.append(found.path, NOTHING)]
    forward, backward = place[found.activity], place[_of_backward(context)]
    number = np.select([forward >= 0, backward >= 0], [forward, kept + backward], 2 * kept)
    inside = np.eye(kept, dtype=np.bool_)
    for each in range(kept - 1, -1, -1):
        if parent[each] >= 0:
            inside[parent[each]] |= inside[each]
    sums = np.eye(2 * kept + 1, dtype=np.bool_)
    sums[:kept, :kept] = sums[kept:-1, kept:-1] = inside
    names = [module_name(context.trace.strings[at]) for at in found.name[first[:kept]].tolist()]
    texts: list[str] = []
    for each, outer in enumerate(parent[:kept].tolist()):
        texts.append(names[each] if outer < 0 else f"{texts[outer]}/{names[each]}")
    labels = (*texts, *(f"{text} (backward)" for text in texts), OUTSIDE)
    devices = attribute(context, Grouping(number.astype(np.int64), labels, sums)) if len(activity) else ()
    return ModuleCounters(tuple(texts), tuple(names), depth[:kept], devices)


def _of_backward(context: Context) -> Ints:
    """For each GPU activity the call of the module whose backward launched it (place in ModuleCalls); NOTHING: none."""
    tree, called, activity = context.get(ops), context.get(module_calls), context.get(gpu)
    root, forward = backward_roots(context)
    module = np.full(len(tree.row) + 1, NOTHING, np.int64)
    if len(root):
        module[tree.place[root]] = called.op[forward]
    parent = tree.nested.tree.parent
    at = np.append(tree.place, NOTHING)[activity.op]
    while (waiting := np.flatnonzero((at >= 0) & (module[at] < 0))).size:
        at[waiting] = parent[at[waiting]]
    found: Ints = module[at]
    return found
