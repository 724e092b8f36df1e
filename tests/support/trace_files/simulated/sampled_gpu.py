"""A simple model of a GPU whose hardware counters are sampled while kernels run on it.

While one kernel runs, a counter has that kernel's value; while several run, the largest of theirs; while none does,
the idle value. A sample is the mean over its time, with noise. Kernels of one name differ a little from each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_trace.model.trace import StringTable, Table, Trace, make_table

from support.trace_files.traces import H100, START_NS, table, target

MS = 1_000_000
H200 = {**H100, "name": "NVIDIA H200"}
UNITS = {"PCIe read": "B/s", "PCIe write": "B/s", "NVLink received": "B/s", "NVLink sent": "B/s",
         "DRAM bytes read": "B/s", "DRAM bytes written": "B/s", "GPC clock": "Hz", "SM clock": "Hz",
         "Memory clock": "Hz", "Power": "W", "Power limit": "W", "Temperature": "°C", "Throttled by power": "",
         "Throttled by heat": "", "Throttled by hardware": ""}  # fmt: skip

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A kernel (or a row of another table). Times in ns from the beginning of the window; counters: label -> value."""

    name: str
    start: int
    duration: int
    counters: Mapping[str, float] = field(default_factory=dict)
    device: int = 0
    stream: int = 7
    kind: str = "kernel"
    correlation: int = 0


def sampled(
    runs: Sequence[Run],
    labels: Sequence[str],
    *,
    length_ns: int,
    sample_ns: int = MS,
    noise: float = 0.005,
    spread: float = 0.02,
    idle: Mapping[str, float] | None = None,
    seed: int = 1,
    rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    **changes: Any,
) -> Trace:
    """A trace with these runs and the samples of these counters on each of their GPUs.

    noise: of samples, as a share of the largest value. spread: standard deviation of a kernel's values as a share of
    its name's. rows: of other tables.
    """
    random, strings = np.random.default_rng(seed), StringTable()
    tables = {kind: table(kind, entries, strings) for kind, entries in (rows or {}).items()}
    for kind in dict.fromkeys(run.kind for run in runs):
        own = [run for run in runs if run.kind == kind]
        tables[kind] = _activities(kind, own, strings)
    columns = [
        _samples(own, label, device, (length_ns, sample_ns), (noise, spread, (idle or {}).get(label, 0.0)), random)
        for device in sorted({run.device for run in runs})
        for own in [[run for run in runs if run.device == device]]
        for label in labels
    ]
    tables["counter"] = counter_table(columns, strings)
    values = {"target": target(), "devices": tuple({**H200, "id": device} for device in range(2)), **changes}
    return Trace(
        strings=tuple(strings.strings),
        tables=tables,
        window_start_ns=START_NS,
        window_end_ns=START_NS + length_ns,
        **values,
    )


def counter_table(columns: Sequence[Mapping[str, Any]], strings: StringTable) -> Table:
    """The table `counter` of several counters: each has label, device, start, duration (arrays) and value."""
    full: dict[str, list[npt.NDArray[Any]]] = {}
    for each in columns:
        count, label = len(each["start"]), each["label"]
        texts = {"name": label, "metric": each.get("metric", f"x__{label}"), "unit": each.get("unit", unit_of(label))}
        for name, text in texts.items():
            full.setdefault(name, []).append(np.full(count, strings.add(text) if text else -1))
        full.setdefault("device", []).append(np.full(count, each["device"]))
        for name in ("start", "duration", "value"):
            full.setdefault(name, []).append(np.asarray(each[name]))
    joined = {name: np.concatenate(parts) for name, parts in full.items()}
    return make_table("counter", len(joined.get("start", ())), joined)


def unit_of(label: str) -> str:
    """The unit in which a counter with this label is measured."""
    return UNITS.get(label, "%")


def _activities(kind: str, runs: Sequence[Run], strings: StringTable) -> Table:
    columns: dict[str, npt.NDArray[Any]] = {
        "name": strings.add_all([run.name for run in runs]),
        "start": np.array([run.start for run in runs], np.int64) + START_NS,
        "duration": np.array([run.duration for run in runs]),
        "device": np.array([run.device for run in runs]),
        "stream": np.array([run.stream for run in runs]),
        "correlation": np.array([run.correlation for run in runs]),
    }
    return make_table(kind, len(runs), columns)


def _samples(
    runs: Sequence[Run],
    label: str,
    device: int,
    times: tuple[int, int],
    model: tuple[float, float, float],
    random: np.random.Generator,
) -> dict[str, Any]:
    """Walks over the borders of runs and adds up the largest value that is active."""
    (length, step), (noise, spread, idle) = times, model
    value = np.array([run.counters.get(label, 0.0) for run in runs])
    value = value * (1 + spread * random.standard_normal(len(runs)))
    start = np.array([run.start for run in runs], np.int64)
    end = start + np.array([run.duration for run in runs], np.int64)
    edges = np.sort(np.concatenate([[0, length], np.clip(start, 0, length), np.clip(end, 0, length)]))
    active = np.full(len(edges) - 1, np.nan)
    first, last = np.searchsorted(edges, np.clip(start, 0, length)), np.searchsorted(edges, np.clip(end, 0, length))
    for low, high, each in zip(first.tolist(), last.tolist(), value.tolist(), strict=True):
        active[low:high] = np.fmax(active[low:high], each)
    active = np.where(np.isnan(active), idle, active)
    total = np.concatenate([[0.0], np.cumsum(active * np.diff(edges))])
    borders = np.arange(0, length + 1, step)
    mean = np.diff(np.interp(borders, edges, total)) / step
    mean = mean + noise * max(float(value.max(initial=0)), abs(idle)) * random.standard_normal(len(mean))
    mean = np.clip(mean, 0, 100) if unit_of(label) == "%" else np.maximum(mean, 0)
    return {"label": label, "device": device, "start": START_NS + borders[:-1], "duration": np.full(len(mean), step),
            "value": mean}  # fmt: skip
