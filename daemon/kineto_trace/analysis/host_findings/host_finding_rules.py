"""All findings about the host, of one trace."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kineto_trace.analysis.finding import CONVERSION_ADVICE, COPY_ADVICE, LOADING, REMEDIES, SMALL_OPERATORS, Finding
from kineto_trace.analysis.host_findings.threads import (
    LEAST_MOMENTS,
    anomaly_mode,
    compilation,
    garbage,
    gil,
    graph_breaks,
    idleness,
    is_enough,
    margin,
    optimizer,
    paging,
    per_step,
    processor_share,
    processors,
    recomputation,
    second_backward,
    total_ns,
)
from kineto_trace.analysis.host_findings.user_code import main_kind, user_code
from kineto_trace.analysis.host_time.moment_classes import MomentClass, moment_classes
from kineto_trace.analysis.host_time.user_calls import (
    UserCalls,
    commonest_place,
    host_steps,
    inclusive_sums,
    moments,
    own_lines,
    slices_below,
    thread_slices,
    user_calls,
)
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import places_by_value
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.base.quantities import format_duration
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import EVALUATE_FUNCTION, forward_backward, gpu, op_roles, ops
from kineto_trace.structure.event_arguments import argument_objects
from kineto_trace.structure.library_calls import CallKind, code_place, function_kinds, functions_named
from kineto_trace.structure.step_phases import StepPhase

CONVERSIONS = ("aten::to", "aten::_to_copy", "aten::type_as")
COPIES = ("aten::clone", "aten::contiguous", "aten::copy_", "aten::repeat", "aten::repeat_interleave")
LEAST = 0.1  # of the steps: most models need to copy a little
MANY = 200  # outermost operators of one function in a step
SMALL_NS = 50_000  # of the function's time for each operator
REMAINS = 0.2  # of the time, for the large operators that take their place


DOUBLE_GAIN = 0.5  # float64 has twice the bytes, and half as many numbers in a vector register
LAYOUT_GAIN = 0.3  # of convolutions, normalisation and pooling, which reorder data or stride over distant numbers
_CONVOLUTION = re.compile(r"^aten::(?:mkldnn_)?convolution")
_IMAGES = 4  # dimensions
MOST = 0.5  # of the time of loading in one function: then it is named
LEAST_STARTS = 2
_MORE = {
    CallKind.COLLATE: "Build batches from whole tensors in the data set, or collate in workers.",
    CallKind.NONE: "Make this function faster: vectorise it, or compute the result once and keep it; collate whole "
    "tensors, and let a sampler draw all random numbers at once.",
}
LEAST_CELLS = 16  # in a step
CELLS_GAIN = 0.5
_CELL = re.compile(r"^aten::(?:gru|lstm|rnn_tanh|rnn_relu)_cell$")
SEEN = 2  # samples of an operator's name in one function and none in another
_LOW = (1 << 32) - 1
_EVALUATES = re.compile("^" + re.escape(EVALUATE_FUNCTION))


# Time in which the step waits for the next batch, by what the DataLoader does in that time.
# All moments below the DataLoader's iterator, or inside its annotation, count. If several steps start worker processes,
# they count for that, with the wait for their first batches; a single one is the program's start. The rest is work in
# the training process, or waiting for workers. The finding names the user's function that has most of it, if one has.
def loading(context: Context) -> Iterator[Finding]:
    """Yields findings about the DataLoader."""
    classes, found = context.get(moment_classes), context.get(moments)
    rows = np.flatnonzero((classes.kind == MomentClass.LOADING) & (classes.weight > 0))
    if not len(rows):
        return
    starting = context.get(below_worker_start)[found.place[rows]]
    steps = unique_values(found.step[rows[starting]])
    if len(steps) >= LEAST_STARTS or (len(steps) and _ends_workers(context, rows[starting])):
        inside = np.isin(found.step[rows], steps)
        yield from _starts(context, rows[inside], len(steps))
        rows = rows[~inside]
    waits = context.get(user_calls).kind[found.place[rows]] == CallKind.WORKER_WAIT
    yield from _waits(context, rows[waits])
    yield from _works(context, rows[~waits])


def below_worker_start(context: Context) -> Flags:
    """Returns for each slice of the training thread whether it starts or ends workers, or runs below a slice
    that does.
    """
    return slices_below(context, context.get(function_kinds).call == CallKind.WORKER_START)


def _ends_workers(context: Context, rows: Ints) -> bool:
    """Returns whether workers are ended at these moments as well as started, which excludes the program's start."""
    found = context.get(moments)
    ends, starts = (
        bool(slices_below(context, functions_named(context, re.compile(text)))[found.place[rows]].any())
        for text in (r"_shutdown_workers$", r"_MultiProcessingDataLoaderIter\.__init__$")
    )
    return ends and starts


def _starts(context: Context, rows: Ints, steps: int) -> Iterator[Finding]:
    weight = float(context.get(moment_classes).weight[rows].sum())
    if is_enough(context, weight, len(rows)):
        yield Finding(
            name="worker_start",
            title="The DataLoader starts its worker processes again and again",
            saving_ns=int(weight),
            advice="Keep the workers alive with DataLoader(persistent_workers=True), and use longer epochs.",
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}, in {steps} steps that start or end "
            "workers, including the wait for their first batches",
        )


def _waits(context: Context, rows: Ints) -> Iterator[Finding]:
    weight = float(context.get(moment_classes).weight[rows].sum())
    if is_enough(context, weight, len(rows)):
        yield Finding(
            name="loader_waits_for_workers",
            title="The step waits for the next batch from the DataLoader's workers",
            saving_ns=int(weight),
            advice="Raise num_workers (up to the number of CPUs, or more if they wait for storage) and "
            "prefetch_factor, or make the data set's __getitem__ and collate_fn faster: the workers are too "
            "slow or too few.",
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}; the workers are separate processes and "
            "not in this trace: trace one by its pid to see what it does",
        )


def _works(context: Context, rows: Ints) -> Iterator[Finding]:
    calls, found, classes = context.get(user_calls), context.get(moments), context.get(moment_classes)
    weight = float(classes.weight[rows].sum())
    if not is_enough(context, weight, len(rows)):
        return
    own = np.bincount(calls.node[found.place[rows]], classes.weight[rows], len(calls))
    loaded = np.zeros(len(calls), np.bool_)
    loaded[calls.node[calls.loading]] = True
    named, part = _dominating(calls, loaded, inclusive_sums(calls, own), weight)
    place, what = "", "The DataLoader builds the next batch in the training process"
    if named != NOTHING:
        line = _line(context, named, rows)
        found_at = code_place(context.trace.strings[int(calls.name[named])], line)
        place, what = str(found_at), f"Data loading takes up part of each step, mostly in {found_at.short}"
    share = classes.weight[rows] / max(weight, 1.0)
    kind = main_kind(calls.kind[found.place[rows]], share)
    more = _MORE.get(kind) or REMEDIES.get(kind) or _MORE[CallKind.NONE]
    idle = float((found.idle[rows] * share).sum())
    yield Finding(
        name="loading_in_the_step",
        title=what,
        saving_ns=int(weight),
        advice=LOADING.format(more=more),
        evidence=f"{per_step(context, weight)}, {margin(context, weight)}{idleness(context, idle)}"
        + (f"; {100 * part / weight:.0f} % of that in this function" if place else ""),
        where=place,
    )


def _dominating(calls: UserCalls, loaded: Flags, weight: Floats, total: float) -> tuple[int, float]:
    """Returns the innermost user's function with most of the time of loading (or NOTHING), and its time."""
    found = NOTHING
    for node in np.flatnonzero(calls.user & loaded & (weight >= MOST * total)).tolist():
        found = node  # inner ones have larger numbers
    return found, float(weight[found]) if found != NOTHING else 0.0


def _line(context: Context, node: int, rows: Ints) -> int:
    """Returns the line at which the function itself was most often; 0 if it was never seen itself."""
    calls, found, slices = context.get(user_calls), context.get(moments), context.get(thread_slices)
    mine = rows[calls.node[found.place[rows]] == node]
    lines = context.get(own_lines)[slices.row[found.place[mine]]]
    lines = lines[lines > 0]
    if not len(lines):
        return 0
    values, counts = np.unique(lines, return_counts=True)
    return int(values[np.argmax(counts)])


# Tensors whose type or layout makes operators on the CPU slow: float64, and images that are not channels-last.
#
# Types and strides are known only where inputs were recorded (--record-shapes); without them there is no finding.
def number_types(context: Context) -> Iterator[Finding]:
    """Yields a finding if operators on the CPU compute in float64."""
    took = _self_time(context, "Input type", _has_double, beside="Input Dims")
    if is_enough(context, took * DOUBLE_GAIN, LEAST_MOMENTS):
        yield Finding(
            name="float64",
            title="Operators compute in float64 (double)",
            saving_ns=int(took * DOUBLE_GAIN),
            advice="Use float32 (or bfloat16): look for .double(), dtype=float64, and data from NumPy, which is "
            "float64 unless it is converted.",
            evidence=f"{per_step(context, took)} in operators with float64 inputs; the saving assumes half of that",
        )


def _has_double(types: Any, dims: Any) -> bool:
    """Returns whether a tensor of at least one dimension is float64: numbers of Python count as such without any."""
    known = isinstance(dims, list) and isinstance(types, list) and len(dims) == len(types)
    return any(kind == "double" and not (known and dims[place] == []) for place, kind in enumerate(types))


def layouts(context: Context) -> Iterator[Finding]:
    """Yields a finding if a convolution network on the CPU keeps its images channel by channel."""
    names = matches(context.trace.strings, _CONVOLUTION)[context.trace.table("cpu_op")["name"]]
    if not names.any() or not _self_time(context, "Input Strides", _is_contiguous, names):
        return
    took = _self_time(context, "Input Strides", _is_contiguous)
    if is_enough(context, took * LAYOUT_GAIN, LEAST_MOMENTS):
        yield Finding(
            name="not_channels_last",
            title="Convolutions run on images in channels-first layout",
            saving_ns=int(took * LAYOUT_GAIN),
            advice="Convert the model and its inputs with .to(memory_format=torch.channels_last).",
            evidence=f"{per_step(context, took)} in operators on channels-first images; the saving assumes "
            f"{100 * LAYOUT_GAIN:.0f} % of that",
        )


def _is_contiguous(strides: Any) -> bool:
    """Returns whether the first input has four dimensions, the last one dense and the second one not."""
    first = strides[0] if isinstance(strides, list) and strides else None
    return isinstance(first, list) and len(first) == _IMAGES and first[3] == 1 and first[1] > 1


def _self_time(
    context: Context, argument: str, chosen: Callable[..., bool], among: Flags | None = None, beside: str = ""
) -> float:
    """Returns the self time (ns), inside the steps, of operators with an argument of this kind.

    beside: another argument that `chosen` gets as well.
    """
    if len(context.get(gpu)):
        return 0.0
    places, values = argument_objects(context, "cpu_op", argument)
    more = [argument_objects(context, "cpu_op", beside)[1]] if beside else []
    known = [each[0] is not None and chosen(*each) for each in zip(values, *more, strict=True)]
    fits = np.array([*known, False])[places]
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    fits &= (places != NOTHING) & (context.get(host_steps).of(table["start"]) >= 0)
    if among is not None:
        fits &= among
    return float(tree.nested.tree.self_time[tree.place][fits].sum())


# Functions of the program that use many small operators where a few large ones would do: loops over rows or numbers.
# Operators that modules call do not count: a model of many layers is not such a loop. On the CPU an operator below a
# few tens of us is mostly the cost of calling it. Each forward operator also has a backward, whose time counts with it.
# What a function of the program runs inside the backward, for an autograd.Function or a hook, counts the same way. With
# a GPU the cost shows as idle time, which other findings explain.
def small_operators(context: Context) -> Iterator[Finding]:
    """Yields a finding for each function whose forward, or whose own part of the backward, is such a loop."""
    if len(context.get(gpu)) or not len(context.get(user_calls)):
        return
    for rows, caller, in_backward in ((*called_directly(context), False), (*called_in_backward(context), True)):
        yield from _loops(context, rows, caller, in_backward)


def _loops(context: Context, rows: Ints, caller: Ints, in_backward: bool) -> Iterator[Finding]:
    """Yields the loops of these operators. caller: the name of the function that called each."""
    if not len(rows):
        return
    functions, place, counts = np.unique(caller, return_inverse=True, return_counts=True)
    steps = max(len(context.get(host_steps).start), 1)
    none = np.zeros(len(functions))
    backward = none if in_backward else backward_ns(context, rows, place.reshape(-1), len(functions))
    for number in np.flatnonzero(counts >= MANY * steps).tolist():
        mine = moments_of(context, int(functions[number]), in_backward)
        weight = float(context.get(moment_classes).weight[mine].sum())
        each = weight / counts[number] * processor_share(context)  # without the wait for a processor
        if each > SMALL_NS or not is_enough(context, weight, len(mine)):
            continue
        whole = weight + float(backward[number])
        where = code_place(context.trace.strings[int(functions[number])])
        more = "" if in_backward else f", and {per_step(context, float(backward[number]))} in their backward pass"
        yield Finding(
            name="small_operators",
            title=f"{where.short} calls {counts[number] / steps:,.0f} small operators per step"
            + (", inside the backward pass" if in_backward else ""),
            saving_ns=int(whole * (1 - REMAINS)),
            advice=SMALL_OPERATORS,
            evidence=f"{per_step(context, weight)}, {margin(context, weight)}, {format_duration(each)} of CPU time per "
            f"operator{more}; the saving assumes that {100 * REMAINS:.0f} % of this time remains",
            where=str(where),
        )


def recurrent_cells(context: Context) -> Iterator[Finding]:
    """Yields a recurrent cell that is stepped through time in Python. What one call would save is a guess."""
    if len(context.get(gpu)) or not len(context.get(user_calls)):
        return
    table, window = context.trace.table("cpu_op"), context.get(host_steps)
    cells = matches(context.trace.strings, _CELL)
    rows = np.flatnonzero(cells[table["name"]] & (table["thread"] == window.thread))
    rows = rows[window.of(table["start"][rows]) >= 0]
    per_step_count = len(rows) / max(len(window.start), 1)
    took, backward = float(table["duration"][rows].sum()), backward_ns(context, rows, rows * 0, 1)
    whole = took + float(backward[0])
    if per_step_count < LEAST_CELLS or not is_enough(context, whole, len(rows)):
        return
    names = outermost_names(context, np.arange(len(context.get(moments))))
    mine = np.flatnonzero(np.append(cells, False)[names])  # the last one is for "none"
    where = commonest_place(context, mine, context.get(moment_classes).weight[mine])
    kind = context.trace.strings[int(table["name"][rows[0]])].removeprefix("aten::").partition("_")[0].upper()
    yield Finding(
        name="recurrent_cells",
        title=f"{where.short if where else 'A loop'} calls {per_step_count:,.0f} {kind} cells per step, one after the "
        "other",
        saving_ns=int(whole * CELLS_GAIN),
        advice=f"Call nn.{kind} once for the whole sequence, packed if lengths differ: it multiplies all inputs at "
        "once, and calls far fewer operators. Where each step needs the output of the one before it, compile the loop "
        "(torch.compile).",
        evidence=f"{per_step(context, took)} in these cells, and {per_step(context, float(backward[0]))} in their "
        f"backward pass; the saving assumes {100 * CELLS_GAIN:.0f} % of that, but depends on their size",
        where=str(where or ""),
    )


def forward_copies(context: Context) -> Iterator[Finding]:
    """Yields a finding for each function whose copies and conversions take much of the steps."""
    if len(context.get(gpu)) or not len(context.get(user_calls)):
        return
    strings = context.trace.strings
    converts, copies = (np.isin(np.array(strings[:], object), names) for names in (CONVERSIONS, COPIES))
    rows, caller = called_directly(context)
    chosen = (converts | copies)[context.trace.table("cpu_op")["name"][rows]]
    rows, caller = rows[chosen], caller[chosen]
    functions, place = np.unique(caller, return_inverse=True)
    backward = backward_ns(context, rows, place.reshape(-1), len(functions))
    for number, function in enumerate(functions.tolist()):
        mine = moments_of(context, function)
        name = outermost_names(context, mine)
        mine, name = mine[name >= 0], name[name >= 0]
        mine, name = mine[(converts | copies)[name]], name[(converts | copies)[name]]
        weight = context.get(moment_classes).weight[mine]
        whole = float(weight.sum()) + float(backward[number])
        if whole < LEAST * total_ns(context) or not is_enough(context, whole, len(mine)):
            continue
        where = code_place(strings[function])
        converting = 2 * float(weight[converts[name]].sum()) > float(weight.sum())
        yield Finding(
            name="conversions_in_the_forward" if converting else "copies_in_the_forward",
            title=f"{where.short} {'converts tensors to other dtypes' if converting else 'copies tensors'}, in the "
            "forward and backward pass",
            saving_ns=int(whole),
            advice=CONVERSION_ADVICE if converting else COPY_ADVICE,
            evidence=f"{per_step(context, float(weight.sum()))}, {margin(context, float(weight.sum()))}, and "
            f"{per_step(context, float(backward[number]))} in their backward pass; the saving assumes that none of "
            "them is needed",
            where=str(where),
        )


HOST_RULES: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    user_code,
    loading,
    gil,
    garbage,
    paging,
    processors,
    optimizer,
    anomaly_mode,
    recomputation,
    compilation,
    graph_breaks,
    second_backward,
    small_operators,
    recurrent_cells,
    forward_copies,
    number_types,
    layouts,
)
USES_OF_TORCH = (  # also with a GPU
    "anomaly_mode",
    "recompilation",
    "compiled_in_the_loop",
    "compile_warm_up",
    "graph_breaks",
    "second_backward",
)


def host_findings(context: Context) -> list[Finding]:
    """Returns the findings about the host, the largest saving first."""
    found = [finding for rule in HOST_RULES for finding in rule(context)]
    return sorted(found, key=lambda finding: -finding.saving_ns)


# Operators that functions of the program call themselves, and the cost of their backward.
# Theory of operation
# An operator belongs to the user's function that is the innermost one when it begins, unless a module runs between
# them. A slice of a function lasts until a sample sees another one, so many operators may begin in the wrong slice:
# samples correct them by name.
def called_directly(context: Context) -> tuple[Ints, Ints]:
    """Returns outermost operators with a backward that user's functions call without a module: rows, names of
    callers.
    """
    table, window = context.trace.table("cpu_op"), context.get(host_steps)
    tree, roles = context.get(ops), context.get(op_roles)
    outermost = tree.nested.tree.parent[tree.place] < 0
    rows = np.flatnonzero(outermost & (table["thread"] == window.thread) & roles.linked & ~roles.backward)
    rows = rows[window.of(table["start"][rows]) >= 0]
    rows = rows[np.argsort(table["start"][rows], kind="stable")]
    inner = _slices_at(context, table["start"][rows])
    caller = _as_sampled(context, table["name"][rows].astype(np.int64), _direct_callers(context, inner))
    return rows[caller != NOTHING], caller[caller != NOTHING]


def _slices_at(context: Context, time: Ints) -> Ints:
    """Returns the innermost slice of the training thread at each of these times, or NOTHING."""
    slices, thread = context.get(thread_slices), context.get(host_steps).thread
    return slices.nested.innermost(np.full(len(time), thread, np.uint32), time).astype(np.int64)


def _direct_callers(context: Context, inner: Ints) -> Ints:
    """Returns the name of the user's function around each of these slices; NOTHING if there is none or a module runs in
    it.
    """
    calls, slices = context.get(user_calls), context.get(thread_slices)
    names = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    caller = np.where(inner >= 0, calls.user_slice[inner], NOTHING)
    begun = np.where(inner >= 0, calls.phase_slice[inner], NOTHING)
    depth = np.append(slices.depth, NOTHING)  # the last one is for "none"
    direct = (caller != NOTHING) & (depth[begun] <= depth[caller])
    return np.where(direct, names[caller], NOTHING)


def _as_sampled(context: Context, op: Ints, caller: Ints) -> Ints:
    """Corrects callers that no sample saw call an operator of that name, while several saw another one do so.

    A slice lasts until a sample sees another function, and thousands of small operators may have run by then. Operators
    that are too short to be sampled belong to the function of their neighbours. All are in order of time.
    """
    found, classes = context.get(moments), context.get(moment_classes)
    seen = np.flatnonzero(
        found.sure & (classes.op >= 0) & np.isin(classes.kind, (MomentClass.FORWARD, MomentClass.OTHER))
    )
    if not len(seen):
        return caller
    pairs, counts = np.unique(
        _pairs(outermost_names(context, seen), _direct_callers(context, found.place[seen])), return_counts=True
    )
    told, known, sure = caller.copy(), set(pairs.tolist()), np.ones(len(caller), np.bool_)
    best: dict[int, tuple[int, int]] = {}
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        best[pair >> 32] = max(best.get(pair >> 32, (0, 0)), (count, pair & _LOW))
    for pair, rows in places_by_value(_pairs(op, caller)):
        count, other = best.get(pair >> 32, (0, 0))
        if pair not in known:
            sure[rows] = count >= SEEN
            told[rows] = other + NOTHING if count >= SEEN else caller[rows]
    return _between(told, sure)


def _between(caller: Ints, sure: Flags) -> Ints:
    """Returns the callers, where unsure ones get the sure caller before and after them, if these agree."""
    places = np.flatnonzero(sure)
    if not len(places):
        return caller
    after = np.searchsorted(places, np.arange(len(caller)))
    before = caller[places[np.maximum(after - 1, 0)]]
    agree = ~sure & (after > 0) & (after < len(places))
    agree &= before == caller[places[np.minimum(after, len(places) - 1)]]
    return np.where(agree, before, caller)


def outermost_names(context: Context, rows: Ints) -> Ints:
    """Returns the name of the outermost operator at each of these moments, or NOTHING."""
    op, tree = context.get(moment_classes).op[rows], context.get(ops)
    if not len(tree.row):
        return np.full(len(rows), NOTHING)
    begins = tree.nested.tree.parent < 0
    outermost = tree.row[np.flatnonzero(begins)[np.cumsum(begins) - 1]]  # by place
    names: Ints = context.trace.table("cpu_op")["name"][outermost[tree.place[op]]].astype(np.int64)
    return np.where(op >= 0, names, NOTHING)


def _pairs(op: Ints, caller: Ints) -> Ints:
    """Returns a number for each pair of an operator's name and its caller's, which may be NOTHING."""
    return op << 32 | (caller - NOTHING)


def called_in_backward(context: Context) -> tuple[Ints, Ints]:
    """Returns operators that user's functions call inside the backward (autograd.Function, hook): rows, callers."""
    table, slices, calls = context.trace.table("cpu_op"), context.get(thread_slices), context.get(user_calls)
    window, tree = context.get(host_steps), context.get(ops)
    engine = matches(context.trace.strings, _EVALUATES)[table["name"]] | (table["forward_thread"] > 0)
    above = tree.nested.tree.parent[tree.place]
    called = np.append(engine, False)[np.where(above >= 0, tree.row[above], -1) if len(tree.row) else above]
    rows = np.flatnonzero(called & ~engine & (table["thread"] == window.thread))
    rows = rows[window.of(table["start"][rows]) >= 0]
    inner = _slices_at(context, table["start"][rows])
    caller = np.where(inner >= 0, calls.user_slice[inner], NOTHING)
    own = (caller != NOTHING) & (calls.phase[caller] == StepPhase.BACKWARD)
    names = context.trace.table("python_function")["name"][slices.row].astype(np.int64)
    return rows[own], names[caller[own]]


def _moment_callers(context: Context) -> Ints:
    """Returns the direct caller at each moment."""
    return _direct_callers(context, context.get(moments).place)


def moments_of(context: Context, function: int, in_backward: bool = False) -> Ints:
    """Returns the moments at which this function calls operators directly, in the forward or inside the backward."""
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    caller = calls.user_slice[found.place]
    direct = context.get(_moment_callers) == function
    if in_backward:
        return np.flatnonzero(direct & (calls.phase[caller] == StepPhase.BACKWARD))
    return np.flatnonzero(direct & (classes.kind == MomentClass.FORWARD))


def backward_ns(context: Context, rows: Ints, place: Ints, count: int) -> Floats:
    """Returns the time (ns) of the backward of these forward operators, by `place`.

    Each node of the graph has the time of the engine's operator around it, and an equal part of the time of the
    backward in which no operator runs: the engine sorts the graph, calls its nodes and frees them.
    """
    table, tree, classes = context.trace.table("cpu_op"), context.get(ops), context.get(moment_classes)
    links, window = forward_backward(context.trace.tables), context.get(host_steps)
    outermost = np.cumsum(tree.nested.tree.parent < 0)[tree.place]  # a number that all nested operators share
    of_group = np.full(int(outermost.max(initial=0)) + 1, NOTHING, np.int64)
    of_group[outermost[rows]] = place
    owner = of_group[outermost[links.forward_rows]]
    engine = matches(context.trace.strings, _EVALUATES)[table["name"]] & (window.of(table["start"]) >= 0)
    took = np.zeros(len(of_group), np.int64)
    took[outermost[engine]] = table["duration"][engine]
    around = outermost[links.backward_rows]
    own = np.where(took[around] > 0, took[around], table["duration"][links.backward_rows])
    known = owner != NOTHING
    in_backward = classes.weight * (classes.kind == MomentClass.BACKWARD)
    between = float(in_backward[classes.op < 0].sum())  # at most what the engine leaves: a sample's time is not exact
    between = min(between, max(float(in_backward.sum()) - float(table["duration"][engine].sum()), 0.0))
    nodes = max(int(np.count_nonzero(engine)), len(links.backward_rows), 1)
    return np.bincount(owner[known], own[known] + between / nodes, count).astype(np.float64)
