"""Samples of hardware counters change no figure of any view that is not about them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kineto_trace import export_trace, open_trace, run_view, views
from kineto_trace.decode.hardware_counters import counter_table
from kineto_trace.errors import TraceError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable, Trace
from kineto_trace.open.raw_target import load_target
from kineto_trace.spool.counter_samples import CounterHeader, CounterSamples, SampledMetric
from support.trace_files.h200 import make_spool

ABOUT_COUNTERS = {"gpu_clocks", "roofline", "throttling", "validate"}  # and those that have the word in their name


def with_counters(trace: Trace) -> Trace:
    """The trace with samples that begin 1 s before its window and end 1 s after it."""
    metrics = (SampledMetric(name="gr__cycles_active.avg", label="GPU busy", unit="%"),)
    header = CounterHeader(
        gpu_uuid="", gpu_index=0, chip="", interval_ns=10**6, metrics=metrics, set="", backend="", library_version=""
    )
    edges = np.linspace(trace.window_start_ns - 10**9, trace.window_end_ns + 10**9, 500).astype(np.int64)
    strings = StringTable()
    strings.add_all(trace.strings)
    samples = CounterSamples(
        header=header, start_ns=edges[:-1], end_ns=edges[1:], values=np.full((499, 1), 50, np.float32), disordered=0
    )
    table = counter_table([(0, samples)], strings, 0, 2**62)
    return replace(trace, tables={**trace.tables, "counter": table}, strings=tuple(strings.strings))


def answers(trace: Trace) -> dict[str, object]:
    """What every view says, in every compatibility."""
    context, found = Context(trace), dict[str, object]()
    for name, view in views().items():
        for compat in ("", *view.compat):
            try:
                result = run_view(name, context, compat=compat) if compat else run_view(name, context)
                found[f"{name} {compat}"] = result.columns, [result.values(column.name) for column in result.columns]
            except TraceError as exc:
                found[f"{name} {compat}"] = str(exc)
    return found


@pytest.mark.parametrize("read", [False, True])
def test_no_other_view_sees_them(tmp_path: Path, read: bool) -> None:
    plain = load_target(make_spool(tmp_path / "raw", "mlp-cupti130001")).trace
    measured = with_counters(plain)
    if read:
        for trace, name in ((plain, "plain.json"), (measured, "measured.json")):
            export_trace(trace, tmp_path / name)
        plain, measured = open_trace(tmp_path / "plain.json"), open_trace(tmp_path / "measured.json")
    assert len(measured.table("counter")) == 499
    expected, found = answers(plain), answers(measured)
    differing = {name for name in expected if repr(expected[name]) != repr(found[name])}
    assert {name.split()[0] for name in differing if "counter" not in name} <= ABOUT_COUNTERS
    assert repr(measured) == repr(plain)
