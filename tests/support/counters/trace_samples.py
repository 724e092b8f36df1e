"""Samples of hardware counters: rows of the table `counter`, and what is the same in two traces."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.trace import Table, Trace

from support.trace_files.traces import START_NS

NAN, INFINITE = float("nan"), float("inf")
ODD_VALUES = (NAN, INFINITE, -INFINITE, -1.0, -0.0, 1e308, -1e308, 3.4e38, 1e-45, 5e-324)
# Texts that JSON, a terminal, Unicode or our own files mind.
ODD_TEXTS = ("", '"', "\\", "\0", "\x1f\x7f", "a\nb", "\ud800", "\udfff", "\u2028", "a,b", "</script>", "DRAM %", "(x)",
             "hardware_counter", "hardware_counter_gap", "%,x,hardware_counter", "x" * 100_000)  # fmt: skip
LAST_NS, LAST_DEVICE = 2**63 - 1, 2**32 - 1


def sample(start: int, end: int, value: float, **more: Any) -> dict[str, Any]:
    """A sample of the use of GPU 0's memory, from start to end."""
    about = {"name": "DRAM", "device": 0, "metric": "dram__throughput.avg", "unit": "%"}
    return {**about, "start": start, "duration": end - start, "value": value, **more}


def hostile_samples() -> list[dict[str, Any]]:
    """Samples with all odd values and short odd texts that overlap, are empty, or lie at the edges of all times."""
    texts = [text for text in ODD_TEXTS if len(text) < 100]
    found = [sample(10 * at, 10 * at + 15, value, name=text, metric=text, unit="%", device=at % 2 * LAST_DEVICE)
             for at, (value, text) in enumerate(zip(ODD_VALUES, texts, strict=False))]  # fmt: skip
    found += [sample(7, 7, 1.0, unit=text) for text in texts]
    return [*found, sample(-START_NS, 0, 50.0), sample(LAST_NS - START_NS - 1, LAST_NS - START_NS, 60.0)]


def readable(trace: Trace, table: Table | None = None) -> list[tuple[Any, ...]]:
    """All samples: device, label, metric, unit, start, end, value ("" for none), sorted."""
    table = trace.table("counter") if table is None else table
    texts = [
        [trace.strings[number] if number >= 0 else "" for number in table[name].tolist()]
        for name in ("name", "metric", "unit")
    ]
    values = ["" if value != value else value for value in table["value"].tolist()]
    times = table["start"].tolist(), table.end().tolist()
    rows = zip(table["device"].tolist(), *texts, *times, values, strict=True)
    return sorted(rows, key=lambda row: (*row[:-1], str(row[-1])))  # no number is smaller or greater than ""


def as_chrome(trace: Trace) -> bytes:
    out = io.BytesIO()
    with TextSink(out) as sink:
        write_chrome(trace, sink, trace_name="t.json")
    return out.getvalue()


def as_perfetto(trace: Trace) -> bytes:
    out = io.BytesIO()
    with TextSink(out) as sink:
        write_perfetto(trace, sink)
    return out.getvalue()


Way = tuple[Callable[[Trace], bytes], Callable[[io.BytesIO], Trace]]
WAYS: dict[str, Way] = {"chrome": (as_chrome, load_chrome), "perfetto": (as_perfetto, load_perfetto)}


def through(trace: Trace, ways: Sequence[str]) -> Trace:
    """The trace after it was written in these formats, each read from the one before."""
    for way in ways:
        write, load = WAYS[way]
        trace = load(io.BytesIO(write(trace)))
    return trace
