"""The view of HLO operations: what the instructions of compiled modules cost, on GPUs and on the CPU."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.decode.xplane.hlo_arguments import KEYS
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING
from kineto_trace.structure.event_arguments import arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

_TABLES = (("kernel", "GPU"), ("cpu_op", "CPU"))
_NOTHING = "the trace has no HLO operations: they are recorded in JAX programs"
_UNKNOWN = "{:.1f} % of the kernels' time belongs to no known HLO operation"
_Place = tuple[str, ...]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Cost:
    """runs and their total and longest duration in ns."""

    runs: int = 0
    total: int = 0
    longest: int = 0


@view(
    "hlo_ops",
    columns(
        ("hlo_op", "text", "", "HLO instruction, as in the compiled module; missing if only the module is known"),
        ("hlo_module", "text", "", "module that it belongs to, such as jit_train_step"),
        ("op_name", "text", "", "path of the JAX operation that it was compiled from; missing if it is unknown"),
        ("source", "text", "", "line of the program that called that operation; missing if it is unknown"),
        ("where", "text", "", "GPU: kernels (or what ran on another device); CPU: operations that the CPU ran"),
        ("runs", "int", "", "number of kernels, or of runs on the CPU"),
        ("total_us", "float", "us", "sum of their durations"),
        ("mean_us", "float", "us", "mean duration"),
        ("max_us", "float", "us", "longest duration"),
        ("share_pct", "float", "%", "share of the time of all kernels, or of all HLO operations on the CPU"),
    ),
)
def hlo_ops(context: Context) -> Answer:
    """What each HLO instruction of a JAX program cost, those with the most time first.

    On a CPU they are recorded by XLA itself. On NVIDIA's GPUs the kernels of the trace are compared with the modules
    that the program has compiled: a kernel that may have run several instructions has only what they have in common.
    Operations of the CPU contain each other, loops for example contain what they run.
    """
    rows: list[tuple[_Place, str, _Cost, float]] = []
    notes = []
    for kind, where in _TABLES:
        costs = _costs(context, kind)
        if not costs:
            continue
        known = sum(cost.total for cost in costs.values())
        whole = int(context.trace.table(kind)["duration"].sum()) if kind == "kernel" else known
        rows += [(place, where, cost, 100 * cost.total / max(whole, 1)) for place, cost in costs.items()]
        if kind == "kernel" and known < whole:
            notes.append(_UNKNOWN.format(100 * (whole - known) / whole))
    rows.sort(key=lambda row: -row[2].total)
    values = {key: [place[number] or None for place, *_ in rows] for number, key in enumerate(KEYS)}
    costs_only = [cost for _, _, cost, _ in rows]
    return Answer(
        {
            **values,
            "where": [where for _, where, _, _ in rows],
            "runs": [cost.runs for cost in costs_only],
            "total_us": [cost.total / 1000 for cost in costs_only],
            "mean_us": [cost.total / cost.runs / 1000 for cost in costs_only],
            "max_us": [cost.longest / 1000 for cost in costs_only],
            "share_pct": [share for *_, share in rows],
        },
        notes or ([] if rows else [_NOTHING]),
    )


def _costs(context: Context, kind: str) -> dict[_Place, _Cost]:
    """Returns the cost of each operation that rows of the table belong to."""
    table, parsed = context.trace.table(kind), arguments(context, kind)
    places = [tuple(_text(found.get(key)) for key in KEYS) for found in parsed.objects]
    rows = np.flatnonzero(parsed.text != NO_STRING)
    text, took = parsed.text[rows], table["duration"][rows]
    count = len(places)
    runs = np.bincount(text, minlength=count)
    total = _sums(text, took, count)
    longest = np.zeros(count, np.int64)
    np.maximum.at(longest, text, took)
    costs: dict[_Place, _Cost] = {}
    for place, *figures in zip(places, runs.tolist(), total.tolist(), longest.tolist(), strict=True):
        if place[1]:  # of a module
            cost = costs.setdefault(place, _Cost())
            cost.runs, cost.total = cost.runs + figures[0], cost.total + figures[1]
            cost.longest = max(cost.longest, figures[2])
    return {place: cost for place, cost in costs.items() if cost.runs}


def _sums(text: Ints, took: Ints, count: int) -> Ints:
    total = np.zeros(count, np.int64)
    np.add.at(total, text, took)
    return total


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
