"""Two traces, or two jobs, compared per step: what became slower, faster, new or gone.

Theory of operation
    Each view makes samples of every trace: the time of each row in each whole step (step_noise.py). Its reduce compares
    exactly two of them and judges every difference by the noise over the steps (step_noise.py). Where a trace has no
    whole steps, figures are per second of the window, and no difference is judged.

    `compare` does that for two traces, `compare_jobs` for the samples of several ranks on each side.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kineto_trace.analysis.diff.event_diff_views import both_sides
from kineto_trace.analysis.diff.step_noise import (
    ERROR_RATE,
    GPU,
    HOST,
    MANY_STEPS,
    NS_PER_US,
    Differences,
    StepSamples,
    StepTimes,
    TimedEvents,
    align_rows,
    compared_steps,
    differences,
    gpu_moments,
    mean_of_ranks,
    samples,
    typical_mean,
)
from kineto_trace.analysis.host_time.operator_views import op_times
from kineto_trace.analysis.overview.step_breakdown import OTHER, ROLES, partition, roles
from kineto_trace.arrays.row_groups import sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Ints
from kineto_trace.base.source_places import source_file
from kineto_trace.errors import ViewError
from kineto_trace.kernel_traits.kernel_types import short_name
from kineto_trace.model.activity_tables import STEP_PREFIX
from kineto_trace.model.context import Context
from kineto_trace.model.trace import TRUNCATED
from kineto_trace.structure.activity_links import calls, gpu, inside_equals, ops, owners, step_names
from kineto_trace.structure.library_calls import code_place
from kineto_trace.structure.module_calls import (
    backward_roots,
    module_calls,
    module_name,
    name_chains,
)
from kineto_trace.structure.nesting import KINDS, build, nest_tables, stack_numbers
from kineto_trace.structure.python_frames import sample_period_ns
from kineto_trace.view_api.result import Result, columns, make_result
from kineto_trace.view_api.view import Answer, View, view

SLOWER, FASTER, NEW, GONE = "slower", "faster", "new", "gone"
NOISE, UNKNOWN = "within noise", "unknown"
CHANGES = (SLOWER, FASTER, NEW, GONE)
PER_STEP, PER_SECOND = "step", "second"
TRIMMED = "means exclude the slowest and the fastest tenth of the steps"  # those of rows that every step has
FEW_STEPS = 4


COLUMNS = columns(
    ("name", "text", "", "what is compared"),
    ("time", "text", "", "kind of time: host, gpu or step"),
    (
        "verdict",
        "text",
        "",
        "slower, faster, new or gone (the difference exceeds the noise between steps), within noise, or unknown (fewer "
        "than two complete steps, or not recorded in one trace)",
    ),
    ("baseline_us", "float", "us", "time per step or second, baseline"),
    ("other_us", "float", "us", "time per step or second, other trace"),
    ("delta_us", "float", "us", "other minus baseline"),
    ("delta_pct", "float", "%", "delta as a share of the baseline; missing if the baseline is 0"),
    ("delta_low_us", "float", "us", "lower end of the interval of the delta; missing if unknown"),
    ("delta_high_us", "float", "us", "upper end of the interval of the delta"),
    ("step_delta_pct", "float", "%", "delta as a share of the baseline's step time"),
    (
        "calls_baseline",
        "float",
        "",
        "number of calls, or of GPU activities, per step or second, baseline; missing for parts of a step",
    ),
    ("calls_other", "float", "", "number of calls, or of GPU activities, per step or second, other trace"),
    ("p_value", "float", "", "probability of such a difference by chance, before correction for the number of rows"),
    ("per", "text", "", "step or second: unit that times and numbers of calls refer to"),
)


OPERATOR_COLUMNS = (
    *COLUMNS,
    *columns(
        ("total_verdict", "text", "", "verdict on the time including nested operators"),
        ("total_baseline_us", "float", "us", "time per step or second including nested operators, baseline"),
        ("total_other_us", "float", "us", "time per step or second including nested operators, other trace"),
        ("total_delta_us", "float", "us", "other minus baseline, including nested operators"),
        ("total_delta_pct", "float", "%", "total_delta_us as a share of the baseline; missing if the baseline is 0"),
    ),
)
TOTALS = ("verdict", "baseline_us", "other_us", "delta_us", "delta_pct")  # named total_… in OPERATOR_COLUMNS
NO_PYTHON = "one trace has no Python functions: record with stacks (with_stack=True, or kinetod's sampler)"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
STEP = "step"  # the row of the whole step, and the kind of time of the parts that sum up to it
NO_OPERATOR = "(no operator)"
BACKWARD = " (backward)"
_INSIDE = " > "  # between the names of a call path
_STEPS = STEP_PREFIX.rstrip("#")


def compare(of: View, baseline: Context, other: Context, **options: Any) -> Result:
    """Compares two traces by a view. Raises ViewError for unknown options."""
    return compare_jobs(of, [of.partial(baseline, **options)], [of.partial(other, **options)], **options)


def compare_jobs(of: View, baseline: Sequence[Any], other: Sequence[Any], **options: Any) -> Result:
    """Compares two jobs by what `of.partial` returned for each rank: steps are means over the ranks.

    Raises ViewError for several ranks of a view that does not compare steps.
    """
    if len(baseline) == len(other) == 1:
        return of.combine([(0, baseline[0]), (1, other[0])], **options)
    if not all(isinstance(each, StepSamples) for each in (*baseline, *other)):
        raise ViewError(f"view {of.name} cannot compare jobs of several ranks: choose one rank")
    return of.combine([(0, mean_of_ranks(baseline)), (1, mean_of_ranks(other))], **options)


def compare_ranks(baseline: Mapping[int, StepSamples], other: Mapping[int, StepSamples]) -> Result:
    """Returns the step time of each rank of two jobs, from partials of diff_step_times by rank.

    Ranks are matched by number. Missing ones are named in the notes. The error rate holds for all ranks together.
    """
    shared = sorted(set(baseline) & set(other))
    tables = []
    for rank in shared:
        answer = judge_rows([(0, baseline[rank]), (1, other[rank])], ERROR_RATE / len(shared), only=STEP)
        row = {name: list(column) for name, column in answer.values.items()}
        row["name"] = [f"rank {rank}"] * len(row["name"])
        tables.append(row)
    values = {column.name: [value for table in tables for value in table[column.name]] for column in COLUMNS}
    return make_result("diff_ranks", COLUMNS, values, missing_ranks(baseline, other))


def missing_ranks(baseline: Mapping[int, Any], other: Mapping[int, Any]) -> list[str]:
    """Returns a note on ranks that only one of two jobs has."""
    notes = []
    for here, there, side in ((baseline, other, "other job"), (other, baseline, "baseline")):
        missing = sorted(set(here) - set(there))
        if missing:
            names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
            notes.append(f"{names} missing in the {side}: not compared")
    return notes


def diff_ops(baseline: Context, other: Context) -> Result:
    """Compares operators by name: see the view diff_operators."""
    return compare(diff_operators, baseline, other)


def diff_kernels(baseline: Context, other: Context) -> Result:
    """Compares kernels by name: see the view diff_kernel_names."""
    return compare(diff_kernel_names, baseline, other)


def diff_steps(baseline: Context, other: Context) -> Result:
    """Compares the time of training steps: see the view diff_step_times."""
    return compare(diff_step_times, baseline, other)


def judge_rows(
    partials: Sequence[tuple[int, StepSamples]], error_rate: float = ERROR_RATE, *, only: str = ""
) -> Answer:
    """Returns the rows of two traces with their verdicts, in the order of the first one. only: returns this
    row alone.
    """
    first, second = align_rows(both_sides(partials))
    steps = min(len(side.steps) for side in (first, second))
    per = PER_STEP if steps else PER_SECOND
    notes = _notes(first, second)
    if not steps:
        first, second = first.per_second(), second.per_second()
    wanted = [only in ("", name) and (steps > 0 or name != STEP) for name, _ in first.names]
    kept = np.array(wanted, np.bool_)
    kept &= (first.calls.sum(1) > 0) | (second.calls.sum(1) > 0)
    names = [name for name, keep in zip(first.names, kept.tolist(), strict=True) if keep]
    sides = [StepTimes(side.us[kept], side.calls[kept], side.resolution_us) for side in (first, second)]
    lacking = _lacking(first, second, names, notes)
    # The step time is one planned comparison; it needs no correction for the many others.
    alone = np.array([name == STEP for name, _ in names], np.bool_)
    times = np.array([time for _, time in names], object)
    families = [alone, *(~alone & ~lacking & (times == time) for time in dict.fromkeys(times.tolist()))]
    found = _in_families(sides, families, error_rate)
    values = _values(names, sides, found)
    step_us = typical_mean(first.step_us) if steps else 1e6
    values["step_delta_pct"] = 100 * values["delta_us"] / step_us if step_us else np.full(len(names), np.nan)
    values["per"] = [per] * len(names)
    return Answer(values, notes)


def _in_families(sides: Sequence[StepTimes], families: Sequence[Flags], error_rate: float) -> Differences:
    blank = np.full(len(sides[0].us), np.nan)
    before, after = (side.us.mean(1) for side in sides)
    nothing = np.zeros(len(blank), np.bool_)
    found = Differences(before, after, blank.copy(), blank.copy(), blank.copy(), nothing)
    for rows in families:
        first, second = (StepTimes(side.us[rows], side.calls[rows], side.resolution_us) for side in sides)
        part = differences(first, second, error_rate)
        for name in Differences.__slots__:
            getattr(found, name)[rows] = getattr(part, name)
    return found


def _values(names: Sequence[tuple[str, str]], sides: Sequence[StepTimes], found: Differences) -> dict[str, Any]:
    delta = found.other - found.baseline
    seen = [side.calls.sum(1) > 0 for side in sides]
    verdict = np.where(np.isnan(found.p), UNKNOWN, NOISE).astype(object)
    verdict[found.changed] = np.where(delta > 0, SLOWER, FASTER)[found.changed]
    verdict[found.changed & ~seen[0]] = NEW
    verdict[found.changed & ~seen[1]] = GONE
    parts = np.array([time == STEP for _, time in names], np.bool_)  # of a step; they have no calls
    share = np.full(len(delta), np.nan)
    np.divide(100 * delta, found.baseline, out=share, where=found.baseline != 0)
    return {
        "name": [name for name, _ in names],
        "time": [time for _, time in names],
        "verdict": verdict,
        "baseline_us": found.baseline,
        "other_us": found.other,
        "delta_us": delta,
        "delta_pct": share,
        "delta_low_us": found.low,
        "delta_high_us": found.high,
        "calls_baseline": np.where(parts, np.nan, sides[0].calls.mean(1)),
        "calls_other": np.where(parts, np.nan, sides[1].calls.mean(1)),
        "p_value": found.p,
    }


def _lacking(first: StepSamples, second: StepSamples, names: Sequence[tuple[str, str]], notes: list[str]) -> Flags:
    """Returns which rows are of a kind of time that one trace does not have at all."""
    found = np.zeros(len(names), np.bool_)
    for time in dict.fromkeys(time for _, time in names):
        of_time = np.array([each == time for _, each in first.names], np.bool_)
        sums = [float(side.total_calls[of_time].sum()) for side in (first, second)]
        if min(sums) == 0 < max(sums):
            side = "baseline" if sums[0] == 0 else "other trace"
            notes.append(f"the {side} has no {time} times here: they were not recorded, or there were none")
            found |= np.array([each == time for _, each in names], np.bool_)
    return found


def _notes(first: StepSamples, second: StepSamples) -> list[str]:
    sides = ("baseline", first), ("other trace", second)
    cut = [f"{name}: {note}" for name, side in sides for note in side.notes if note.startswith(TRUNCATED)]
    paces = [f"{name}: {side.pace_note}" for name, side in sides if side.pace_note]
    others = (note for note in (*first.notes, *second.notes) if not note.startswith(TRUNCATED))
    notes = [*cut, *paces, *dict.fromkeys(others)]
    counts = len(first.steps), len(second.steps)
    if not min(counts):
        which = "baseline" if not counts[0] else "other trace"
        which = "traces" if not max(counts) else which
        return [
            f"the {which} {'have' if which == 'traces' else 'has'} no complete training steps (ProfilerStep#N) that "
            "show the program's usual pace: times are per second of each recording, and differences are not judged, "
            "because the noise is unknown",
            *notes,
        ]
    told = f"complete steps: {_steps(first)} in the baseline, {_steps(second)} in the other trace"
    if min(counts) == 1:
        told += "; differences are not judged, because a single step does not show how much steps vary"
    elif min(counts) < FEW_STEPS:
        told += "; with so few steps, only large differences stand out from the noise"
    if max(counts) >= MANY_STEPS:
        told += f"; {TRIMMED}"
    return [told, *notes]


def _steps(side: StepSamples) -> str:
    left_out = f" ({side.left_out} incomplete left out)" if side.left_out else ""
    return f"{len(side.steps)}{left_out}"


def _in_order(partials: Sequence[tuple[int, StepSamples]]) -> Answer:
    return judge_rows(partials)


def _by_change(partials: Sequence[tuple[int, StepSamples]]) -> Answer:
    return _changes_first(judge_rows(partials))


def _with_totals(partials: Sequence[tuple[int, StepSamples]]) -> Answer:
    """Returns the operators by their own time, and those that only have nested ones."""
    own = judge_rows(partials)
    inside = judge_rows([(rank, side.inside or side) for rank, side in partials]).values
    places = {key: at for at, key in enumerate(_row_keys(inside))}
    known = {key: at for at, key in enumerate(_row_keys(own.values))}
    rows = list(dict.fromkeys((*known, *places)))
    values: dict[str, Any] = {
        name: [column[known[key]] if key in known else _nothing(name, inside, places[key]) for key in rows]
        for name, column in own.values.items()
    }
    for name in TOTALS:
        values[f"total_{name}"] = [inside[name][places[key]] if key in places else None for key in rows]
    return _changes_first(Answer({name: np.array(column, object) for name, column in values.items()}, own.notes))


def _row_keys(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return list(zip(values["name"], values["time"], strict=True))


def _nothing(name: str, inside: Mapping[str, Any], place: int) -> Any:
    """Returns the value of a column for an operator without time of its own in either trace."""
    if name in ("name", "time", "per"):
        return inside[name][place]
    if name == "verdict":
        return UNKNOWN if inside[name][place] == UNKNOWN else NOISE
    return 0.0 if name in ("baseline_us", "other_us", "delta_us", "step_delta_pct") else None


def _changes_first(answer: Answer) -> Answer:
    values = answer.values
    changed = np.isin(values["verdict"].astype(str), CHANGES)
    delta = np.abs(np.array(values["delta_us"], np.float64))
    order = np.lexsort((np.array(values["name"], np.str_), -delta, ~changed))
    sorted_values = {
        name: [column[row] for row in order.tolist()] if isinstance(column, list) else column[order]
        for name, column in values.items()
    }
    return Answer(sorted_values, answer.notes)


@view("diff_step_times", COLUMNS, reduce=_in_order)
def diff_step_times(context: Context) -> StepSamples:
    """The time of a training step in two traces, and which parts of it changed.

    The first row is the whole step on the host. Below it are the roles of the view `step_breakdown`, which add up to
    it. All views that compare traces use only the measured steps (see the view overview). The verdict separates real
    differences from noise between steps: at most 5 % of the rows reported as changed differ only by chance, and the
    interval of such a row excludes 0. Two recordings of the same program may still differ because of clocks, placement
    or other programs, since the noise is measured within each recording.
    """
    return role_samples(context)


@view("diff_operators", OPERATOR_COLUMNS, reduce=_with_totals)
def diff_operators(context: Context, *, total: bool = False) -> StepSamples:
    """Operators of two traces by name: their self time per step, and what changed.

    Host time excludes nested operators; GPU time is that of the work that the operator itself launched. The columns
    `total_…` include nested operators, but an operator nested in one of the same name counts only once. GPU work
    launched outside any operator counts for the annotation around its launch. Same rules as diff_step_times. Changed
    rows come first, largest difference first.

    Options:
    - total: include nested operators in all columns.
    """
    inside = operator_samples(context, total=True)
    return replace(inside if total else operator_samples(context, total=False), inside=inside)


@view("diff_kernel_names", COLUMNS, reduce=_by_change)
def diff_kernel_names(context: Context, *, short_names: bool = False) -> StepSamples:
    """Kernels, copies and fills of two traces by name: their GPU time per step, and what changed.

    A kernel belongs to the step in which it was launched. Same rules as diff_step_times. Changed rows come first,
    largest difference first.

    Options:
    - short_names: drop template arguments, parameters and return types, so that variants of a kernel share a row.
    """
    return kernel_samples(context, short_names=short_names)


@view("diff_modules", COLUMNS, reduce=_by_change)
def diff_modules(context: Context, *, total: bool = False) -> StepSamples:
    """Modules of two traces by their path in the model: their self time per step, and what changed.

    Times of a module exclude nested modules. The backward pass of a module (the backward operators of its operators)
    has a row of its own, whose name ends in " (backward)". Same rules as diff_step_times. Changed rows come first,
    largest difference first.

    Options:
    - total: include nested modules.
    """
    return module_samples(context, total=total)


@view("diff_call_paths", COLUMNS, reduce=_by_change)
def diff_call_paths(context: Context, *, total: bool = False) -> StepSamples:
    """Call paths of two traces: time per step of operators and annotations in each chain of calls, and what changed.

    The names in a path are separated by " > "; paths are those of the view `call_tree`. Times are self times. Same
    rules as diff_step_times. Changed rows come first, largest difference first.

    Options:
    - total: include nested calls.
    """
    return path_samples(context, total=total)


@view("diff_python_functions", COLUMNS, reduce=_by_change)
def diff_python_functions(context: Context) -> StepSamples:
    """Python functions of two traces: time per step in which each was the innermost function, and what changed.

    C code called by a function counts for that function. Functions are matched by file and name, regardless of line and
    folder. Sampled time is the number of samples times the sampling interval, waiting included. Same rules as
    diff_step_times. Changed rows come first, largest difference first.
    """
    return function_samples(context)


# Python functions as rows of a diff: the time in which each was the innermost one, from samples or recorded calls.
# Line numbers and folders change with the version of a program, so a function is matched by its file, as source_file()
# names it, and its name alone.
def function_samples(context: Context) -> StepSamples:
    """Returns samples of the innermost Python function, including the C code that it calls."""
    table = context.trace.table("python_function")
    sampled = np.flatnonzero(table["self_samples"] > 0)
    period = sample_period_ns(context.trace)
    exact = np.flatnonzero(table["samples"] == 0)
    nested = nest_tables([table.take(exact)], context.trace.window_end_ns)
    calls = exact[nested.order]
    rows = np.concatenate([sampled, calls])
    took = np.concatenate([table["self_samples"][sampled].astype(np.int64) * period, nested.tree.self_time])
    names = [function_name(text) for text in context.trace.strings]
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    key = np.array([number[name] for name in names] or [0], np.int64)[table["name"][rows]]
    part = TimedEvents(HOST, key, table["start"][rows], took)
    return samples(context, [part], list(number), [] if len(rows) else [NO_PYTHON])


def function_name(text: str) -> str:
    """Returns a function's name without what differs between versions of a program."""
    place = code_place(text)
    if not place.file:
        return _ADDRESS.sub("", text)
    return f"{source_file(place.file)}: {place.function}"


def role_samples(context: Context) -> StepSamples:
    """Returns samples of the whole step, and of the roles of step_breakdown.py that sum up to it."""
    found = compared_steps(context)
    trace, length = context.trace, found.end - found.start
    start, end = (np.append(*pair) for pair in ((found.start, trace.window_start_ns), (found.end, trace.window_end_ns)))
    shares = partition(context.get(roles), start, np.maximum(end, start)) / NS_PER_US
    us, total = np.vstack([length / NS_PER_US, shares[:, :-1]]), np.append(0, shares[:, -1])
    bare = samples(context, (), ())
    return replace(
        bare,
        names=tuple((name, STEP) for name in (STEP, *ROLES, OTHER)),
        us=us,
        calls=(us > 0).astype(np.float64),
        total_us=total,
        total_calls=(total > 0).astype(np.float64),
    )


def operator_samples(context: Context, *, total: bool) -> StepSamples:
    """Returns samples of operators by name.

    total: with nested operators; an operator nested in one of its name adds nothing.
    """
    table, times, activity = context.trace.table("cpu_op"), context.get(op_times), context.get(gpu)
    name = table["name"].astype(np.int64)
    outer = ~inside_equals(context, name)
    host = TimedEvents(HOST, name, table["start"], times.host_total * outer if total else times.host_exclusive)
    outside = len(context.trace.strings)
    owner = context.get(owners)
    is_step = np.append(context.get(step_names), False)
    owner = np.where((owner == NOTHING) | is_step[owner], outside, owner)
    took, moment = activity.end - activity.start, context.get(gpu_moments).at
    own = TimedEvents(GPU, owner, moment, took)
    if total:
        of, node = _around(activity.op, _op_parents(context))
        of, node = of[outer[node]], node[outer[node]]
        of, key = np.append(of, np.flatnonzero(activity.op < 0)), np.append(name[node], owner[activity.op < 0])
        own = TimedEvents(GPU, key, moment[of], took[of])
    return samples(context, (host, own), (*context.trace.strings, NO_OPERATOR))


def kernel_samples(context: Context, *, short_names: bool) -> StepSamples:
    """Returns samples of kernels, copies and fills by name."""
    activity, strings = context.get(gpu), context.trace.strings
    key, names = activity.name.astype(np.int64), strings
    if short_names:
        used, place = np.unique(key, return_inverse=True)
        shorter = [short_name(strings[number]) for number in used.tolist()]
        names = list(dict.fromkeys(shorter))
        at = {text: number for number, text in enumerate(names)}
        key = np.array([at[text] for text in shorter], np.int64)[place]
    return samples(context, [TimedEvents(GPU, key, context.get(gpu_moments).at, activity.end - activity.start)], names)


def module_samples(context: Context, *, total: bool) -> StepSamples:
    """Returns samples of modules by their path, and of their backward passes."""
    found, activity, times = context.get(module_calls), context.get(gpu), context.get(op_times)
    table, length = context.trace.table("cpu_op"), found.end - found.start
    inside = np.flatnonzero(found.parent >= 0)
    host = length if total else length - sums(found.parent[inside], length[inside], len(found))
    own_names = [module_name(context.trace.strings[number]) for number in found.name[found.first].tolist()]
    names = ["/".join(chain) for chain in name_chains(found.around, own_names)]
    took, moment = activity.end - activity.start, context.get(gpu_moments).at
    of, node = _around(found.activity, found.parent if total else np.full(len(found), NOTHING))
    module = np.append(found.path, NOTHING)[_backward_modules(context, found.op)]  # per row of cpu_op
    back = np.flatnonzero(module >= 0)
    back_of, root = _around(activity.op, _op_parents(context))
    back_of, root = back_of[module[root] >= 0], root[module[root] >= 0]
    parts = [
        TimedEvents(HOST, found.path, found.start, host),
        TimedEvents(GPU, found.path[node], moment[of], took[of]),
        TimedEvents(HOST, len(names) + module[back], table["start"][back], times.host_total[back]),
        TimedEvents(GPU, len(names) + module[root], moment[back_of], took[back_of]),
    ]
    notes = [] if len(found) else ["one trace has no module calls: record with with_modules=True or with_stack=True"]
    return samples(context, parts, [*names, *(name + BACKWARD for name in names)], notes)


def _backward_modules(context: Context, call_of_op: Ints) -> Ints:
    """Returns for each row of cpu_op the module call whose backward pass it runs, or NOTHING."""
    found = np.full(len(context.trace.table("cpu_op")), NOTHING, np.int64)
    root, forward = backward_roots(context)
    found[root] = call_of_op[forward]
    return found


def _op_parents(context: Context) -> Ints:
    """Returns for each row of cpu_op the row of the operator around it, or NOTHING."""
    tree = context.get(ops)
    above = tree.nested.tree.parent[tree.place].astype(np.int64)
    return np.where(above >= 0, tree.row[above], NOTHING) if len(above) else above


def _around(node: Ints, parent: AnyArray) -> tuple[Ints, Ints]:
    """Returns all pairs of an item and a node around it. node: the innermost node of each item, or NOTHING."""
    items, nodes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    item = np.flatnonzero(node >= 0)
    level = node[item].astype(np.int64)
    while len(item):
        items.append(item)
        nodes.append(level)
        level = parent[level].astype(np.int64)
        item, level = item[level >= 0], level[level >= 0]
    return np.concatenate(items), np.concatenate(nodes)


def path_samples(context: Context, *, total: bool) -> StepSamples:
    """Returns samples of operators and annotations by their chain of names."""
    trace, activity, called = context.trace, context.get(gpu), context.get(calls)
    tree = build({kind: trace.tables[kind] for kind in KINDS[1:] if kind in trace.tables}, trace.window_end_ns)
    name = np.zeros(len(tree), np.int64)
    for number, kind in enumerate(KINDS):
        own = tree.kind == number
        name[own] = trace.table(kind)["name"][tree.row[own]]
    steps = context.get(step_names)
    name = np.where(steps[name], np.argmax(steps), name) if steps.any() else name
    path, above, frames = stack_numbers(tree.parent, name, tree.depth)
    texts = [_STEPS if is_step else text for text, is_step in zip(trace.strings, steps.tolist(), strict=True)]
    names = [_INSIDE.join(chain) for chain in name_chains(above, [texts[number] for number in frames.tolist()])]
    node = np.append(tree.innermost(called.thread, called.start).astype(np.int64), NOTHING)[activity.call]
    took, moment = activity.end - activity.start, context.get(gpu_moments).at
    of, around = _around(node, tree.parent if total else np.full(len(tree), NOTHING))
    host = TimedEvents(HOST, path, tree.start, tree.end - tree.start if total else tree.self_ns)
    return samples(context, [host, TimedEvents(GPU, path[around], moment[of], took[of])], names)
