"""Two traces, or two jobs, compared per step: what became slower, faster, new or gone.

Theory of operation
    Each view makes samples of every trace: what each row took in each whole step (step_samples.py). Its reduce puts
    exactly two of them beside each other and judges every difference by the noise over the steps (step_noise.py).
    Where a trace has no whole steps, figures are per second of the window, and no difference is judged.

    `compare` does that for two traces, `compare_jobs` for the samples of several ranks on each side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.diff.function_samples import function_samples
from kineto_trace.analysis.diff.name_totals import two
from kineto_trace.analysis.diff.row_samples import (
    STEP,
    kernel_samples,
    module_samples,
    operator_samples,
    path_samples,
    role_samples,
)
from kineto_trace.analysis.diff.step_noise import ERROR_RATE, Differences, StepTimes, differences, typical
from kineto_trace.analysis.diff.step_samples import StepSamples, aligned, mean_of_ranks
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result, columns, make_result
from kineto_trace.view_api.view import Answer, View, view

SLOWER, FASTER, NEW, GONE = "slower", "faster", "new", "gone"
NOISE, UNKNOWN = "within noise", "unknown"
CHANGES = (SLOWER, FASTER, NEW, GONE)
PER_STEP, PER_SECOND = "step", "second"
FEW_STEPS = 4

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

COLUMNS = columns(
    ("name", "text", "", "what is compared"),
    ("time", "text", "", "host, gpu, or step: which time the figures are"),
    (
        "verdict",
        "text",
        "",
        "slower, faster, new or gone (differences beyond the noise over the steps), within noise, or unknown (the "
        "noise cannot be told: fewer than two whole steps, or not recorded in one trace)",
    ),
    ("baseline_us", "float", "us", "time per step or second, baseline"),
    ("other_us", "float", "us", "time per step or second, other trace"),
    ("delta_us", "float", "us", "other less baseline"),
    ("delta_pct", "float", "%", "delta as a share of the baseline; missing if the baseline is 0"),
    ("delta_low_us", "float", "us", "lower end of the interval of the delta; missing if it is not known"),
    ("delta_high_us", "float", "us", "upper end of the interval of the delta"),
    ("step_delta_pct", "float", "%", "delta as a share of the baseline's step time"),
    ("calls_baseline", "float", "", "number of calls per step or second, baseline; missing for parts of a step"),
    ("calls_other", "float", "", "number of calls per step or second, other trace"),
    ("p_value", "float", "", "probability of such a difference by chance, before the correction for many rows"),
    ("per", "text", "", "step or second: what the figures are per"),
)


OPERATOR_COLUMNS = (
    *COLUMNS,
    *columns(
        ("total_verdict", "text", "", "the same verdict on the time with the operators inside"),
        ("total_baseline_us", "float", "us", "time per step or second with the operators inside, baseline"),
        ("total_other_us", "float", "us", "time per step or second with the operators inside, other trace"),
        ("total_delta_us", "float", "us", "other less baseline, with the operators inside"),
        ("total_delta_pct", "float", "%", "that as a share of the baseline; missing if the baseline is 0"),
    ),
)
TOTALS = ("verdict", "baseline_us", "other_us", "delta_us", "delta_pct")  # which OPERATOR_COLUMNS has as total_…


def compare(of: View, baseline: Context, other: Context, **options: Any) -> Result:
    """Returns a view that compares traces for two of them. Raises ViewError for unknown options."""
    return compare_jobs(of, [of.partial(baseline, **options)], [of.partial(other, **options)], **options)


def compare_jobs(of: View, baseline: Sequence[Any], other: Sequence[Any], **options: Any) -> Result:
    """Returns such a view for what `of.partial` gave for each rank: steps are means over the ranks.

    Raises ViewError for several ranks of a view that does not compare steps.
    """
    if len(baseline) == len(other) == 1:
        return of.combine([(0, baseline[0]), (1, other[0])], **options)
    if not all(isinstance(each, StepSamples) for each in (*baseline, *other)):
        raise ViewError(f"view {of.name} compares one trace with one: choose a rank")
    return of.combine([(0, mean_of_ranks(baseline)), (1, mean_of_ranks(other))], **options)


def compare_ranks(baseline: Mapping[int, StepSamples], other: Mapping[int, StepSamples]) -> Result:
    """Returns the step time of each rank of two jobs, of partials of diff_step_times by rank.

    Ranks are matched by number. Missing ones are named in the notes. All ranks together keep the error rate.
    """
    shared = sorted(set(baseline) & set(other))
    tables = []
    for rank in shared:
        answer = judged([(0, baseline[rank]), (1, other[rank])], ERROR_RATE / len(shared), only=STEP)
        row = {name: list(column) for name, column in answer.values.items()}
        row["name"] = [f"rank {rank}"] * len(row["name"])
        tables.append(row)
    values = {column.name: [value for table in tables for value in table[column.name]] for column in COLUMNS}
    return make_result("diff_ranks", COLUMNS, values, missing_ranks(baseline, other))


def missing_ranks(baseline: Mapping[int, Any], other: Mapping[int, Any]) -> list[str]:
    """Says which ranks only one of two jobs has."""
    notes = []
    for here, there, side in ((baseline, other, "other job"), (other, baseline, "baseline")):
        missing = sorted(set(here) - set(there))
        if missing:
            names = ", ".join(map(str, missing))
            notes.append(f"rank{'s' if len(missing) > 1 else ''} {names} missing in the {side}: not compared")
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


def judged(partials: Sequence[tuple[int, StepSamples]], error_rate: float = ERROR_RATE, *, only: str = "") -> Answer:
    """Returns the rows of two traces with their verdicts, in the order of the first one. only: one row."""
    first, second = aligned(two(partials))
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
    step_us = typical(first.step_us) if steps else 1e6
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
    parts = np.array([time == STEP for _, time in names], np.bool_)  # of a step, which nobody calls
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
    """Which rows are of a kind of time that one trace does not have at all."""
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
    paces = [
        f"{name}: {side.pace_note}" for name, side in (("baseline", first), ("other trace", second)) if side.pace_note
    ]
    notes = [*paces, *dict.fromkeys((*first.notes, *second.notes))]
    counts = len(first.steps), len(second.steps)
    if not min(counts):
        which = "baseline" if not counts[0] else "other trace"
        which = "traces" if not max(counts) else which
        return [
            f"the {which} {'have' if which == 'traces' else 'has'} no whole training steps (ProfilerStep#N) that show "
            "the pace: times are per second of each recording, and no difference is judged because its noise is not "
            "known",
            *notes,
        ]
    told = f"{_steps(first)} of the baseline against {_steps(second)} of the other trace, whole steps only"
    if min(counts) == 1:
        told += "; no difference is judged, because one step does not show how much steps vary"
    elif min(counts) < FEW_STEPS:
        told += "; with so few steps only large differences stand out from the noise"
    return [told, *notes]


def _steps(side: StepSamples) -> str:
    count = f"{len(side.steps)} step{'s' if len(side.steps) > 1 else ''}"
    return f"{count} ({side.left_out} incomplete)" if side.left_out else count


def _in_order(partials: Sequence[tuple[int, StepSamples]]) -> Answer:
    return judged(partials)


def _by_change(partials: Sequence[tuple[int, StepSamples]]) -> Answer:
    return _changes_first(judged(partials))


def _with_totals(partials: Sequence[tuple[int, StepSamples]]) -> Answer:
    """The operators by their own time, and those that have only others inside."""
    own = judged(partials)
    inside = judged([(rank, side.inside or side) for rank, side in partials]).values
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
    """The value of a column in the row of an operator that has no time of its own in either trace."""
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

    The first row is the whole step on the host. Below it are the roles of the view `step_breakdown`, which sum up to
    it. Every view that compares traces takes the measured steps only (view overview). The verdict tells a difference
    from the noise over the steps: at most 5 % of the rows that are called changed are so by chance, and the interval of
    such a row excludes 0. Two recordings of the same program may still differ, because of clocks, placement or other
    programs: the noise is that within each recording.
    """
    return role_samples(context)


@view("diff_operators", OPERATOR_COLUMNS, reduce=_with_totals)
def diff_operators(context: Context, *, total: bool = False) -> StepSamples:
    """Operators of two traces by name: the time of their own in each step, and what changed.

    Host time is that of the operator without the operators inside it; GPU time is what it launched itself. The columns
    `total_…` count the operators inside as well; inside one of the same name an operator adds nothing. GPU work
    outside operators counts for the annotation around its launch. The rules are those of diff_step_times. Changed rows
    come first, those with the largest difference before others.

    Options:
    - total: count the operators inside in all columns.
    """
    inside = operator_samples(context, total=True)
    return replace(inside if total else operator_samples(context, total=False), inside=inside)


@view("diff_kernel_names", COLUMNS, reduce=_by_change)
def diff_kernel_names(context: Context, *, short_names: bool = False) -> StepSamples:
    """Kernels, copies and fills of two traces by name: the GPU time of each step, and what changed.

    A kernel belongs to the step in which it was launched. The rules are those of diff_step_times. Changed rows come
    first, those with the largest difference before others.

    Options:
    - short_names: drop template arguments, parameters and return types, so that variants of a kernel share a row.
    """
    return kernel_samples(context, short_names=short_names)


@view("diff_modules", COLUMNS, reduce=_by_change)
def diff_modules(context: Context, *, total: bool = False) -> StepSamples:
    """Modules of two traces by their path in the model: the time of their own in each step, and what changed.

    Times of a module are those without the modules inside it. The backward pass has a row of its own, which ends in
    " (backward)": the backward operators of the module's operators. The rules are those of diff_step_times. Changed
    rows come first, those with the largest difference before others.

    Options:
    - total: count the modules inside as well.
    """
    return module_samples(context, total=total)


@view("diff_call_paths", COLUMNS, reduce=_by_change)
def diff_call_paths(context: Context, *, total: bool = False) -> StepSamples:
    """Call paths of two traces: operators and annotations by all that is around them, per step, and what changed.

    Names of a path are separated by " > "; paths are those of the view `call_tree`. Times are those without what is
    inside. The rules are those of diff_step_times. Changed rows come first, those with the largest difference before
    others.

    Options:
    - total: count what is inside as well.
    """
    return path_samples(context, total=total)


@view("diff_python_functions", COLUMNS, reduce=_by_change)
def diff_python_functions(context: Context) -> StepSamples:
    """Python functions of two traces: the time in which each was the innermost one, per step, and what changed.

    The C code that a function calls counts for it. Functions are matched by file and name, whatever the line and the
    folder. Sampled time is the number of samples times their interval, waiting included. The rules are those of
    diff_step_times. Changed rows come first, those with the largest difference before others.
    """
    return function_samples(context)
