"""Samples and kernels of any kind: views answer without errors, and with values that can be."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_trace.analysis.counters import hardware_counter_views, roofline
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.overview.counter_series_views import counter_curves, counter_summary, counters
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable, Trace, make_table
from kineto_trace.view_api.view import View
from support.counters.trace_samples import LAST_DEVICE, LAST_NS, ODD_TEXTS, ODD_VALUES
from support.trace_files.simulated.sampled_gpu import H200, counter_table
from support.trace_files.traces import START_NS, target

VIEWS = [
    roofline.gpu_clocks,
    roofline.throttling_spans,
    hardware_counter_views.annotation_counters,
    hardware_counter_views.gpu_counters,
    hardware_counter_views.kernel_counters,
    hardware_counter_views.module_counters,
    hardware_counter_views.op_counters,
    hardware_counter_views.collective_counters,
    roofline.roofline,
    hardware_counter_views.step_counters,
    counters,
    counter_curves,
    counter_summary,
]
LENGTH = 1_000
LABELS = ("DRAM", "Tensor pipe", "SM busy", "Power", "SM clock", "Throttled by heat", "NVLink sent", "Temperature")
KERNELS = ("copy", "nvjet_tst", "ncclDevKernel_AllReduce_Sum_f32", "vectorized_elementwise_kernel<float>")

values = st.one_of(st.floats(-50, 250), st.sampled_from([0.0, 100.0, 1e12, *ODD_VALUES]))
labels = st.sampled_from([*2 * LABELS, *ODD_TEXTS])
starts = st.one_of(*[st.integers(-200, 1200)] * 9, st.sampled_from([-START_NS, LAST_NS - START_NS - 120]))
devices = st.sampled_from([0, 0, 0, 1, 1, LAST_DEVICE])
samples = st.lists(st.tuples(starts, st.integers(0, 120), labels, devices, values), max_size=60)
regular = st.lists(st.tuples(labels, values), max_size=4)
kernels = st.lists(
    st.tuples(st.integers(-100, 1100), st.integers(0, 400), st.sampled_from(KERNELS), st.integers(0, 2),
              st.integers(0, 2)),
    max_size=30,
)  # fmt: skip


def made(samples: list[Any], regular: list[Any], kernels: list[Any]) -> Trace:
    strings = StringTable()
    columns = [
        {"label": label, "device": device, "start": np.array([START_NS + start]), "duration": np.array([length]),
         "value": np.array([value])}
        for start, length, label, device, value in samples
    ]  # fmt: skip
    columns += [
        {"label": label, "device": 0, "start": START_NS + 10 * np.arange(100), "duration": np.full(100, 10),
         "value": np.full(100, value)}
        for label, value in regular
    ]  # fmt: skip
    start, duration, name, device, stream = ([row[at] for row in kernels] for at in range(5))
    numbers: dict[str, Any] = {
        "start": np.array(start, np.int64) + START_NS,
        "duration": np.array(duration, np.int64),
        "name": strings.add_all(name),
        "device": np.array(device, np.int64),
        "stream": np.array(stream, np.int64),
    }
    tables = {"counter": counter_table(columns, strings), "kernel": make_table("kernel", len(kernels), numbers)}
    return Trace(target=target(), strings=tuple(strings.strings), tables=tables, window_start_ns=START_NS,
                 window_end_ns=START_NS + LENGTH, devices=(H200,))  # fmt: skip


@given(samples, regular, kernels)
@settings(max_examples=40, deadline=None)
def test_views_answer_with_values_that_can_be(samples: list[Any], regular: list[Any], kernels: list[Any]) -> None:
    context = Context(made(samples, regular, kernels))
    for view in VIEWS:
        result = view(context)
        assert result.to_arrow().num_rows == len(result)
        for row in result.rows():
            assert row.get("why") or row.get("value", 0) is not None or view in (counters,)
            for key in ("value_pct", "dram_pct", "tensor_pct", "unsampled_pct", "shared_pct", "steps_throttled_pct"):
                assert row.get(key) is None or -1e-9 <= row[key] <= 100 + 1e-9
            if row.get("unit") == "%" and row.get("value") is not None:
                assert 0 <= row["value"] <= 100
            assert row.get("error") is None or row["error"] >= 0
    assert all(finding.saving_ns >= 0 for finding in findings(context).findings)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_nothing_at_all_is_an_answer(view: View) -> None:
    found = view(Context(made([], [], [])))
    assert len(found) == 0 and found.notes
