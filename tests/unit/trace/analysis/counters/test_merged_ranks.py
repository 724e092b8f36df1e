"""Merged files: samples of GPUs that share a number are nobody's, those of GPUs with numbers of their own are kept."""

from dataclasses import replace
from pathlib import Path

import kineto_trace
import pytest
from kineto_trace.analysis.counters.hardware_counter_views import gpu_counters, kernel_counters
from kineto_trace.analysis.counters.roofline import roofline, throttling_spans
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.overview.counter_series_views import counter_curves, counter_summary, counters
from kineto_trace.merge.merged_export import merge_traces
from kineto_trace.model.context import Context
from kineto_trace.open.trace_discovery import Source
from support.trace_files.simulated.sampled_gpu import MS, Run, sampled

MIXED = (
    "samples of GPU 0 are left out: in the merged file, GPUs of several ranks have this number; run the view on each "
    "rank's own trace"
)
LABELS = ["DRAM", "SM clock", "Throttled by power"]


def merged(path: Path, *, devices: tuple[int, int], sampled_ranks: int = 2, name: str = "m.json") -> Context:
    """Two ranks, each with one kernel of its own and the samples of its GPU, in one file."""
    sources = []
    for rank, device in enumerate(devices):
        counters = {"DRAM": 80.0 - 60 * rank, "SM clock": 1e9, "Throttled by power": 1.0}
        runs = [
            Run(name=f"kernel{rank}", start=at * 20 * MS, duration=15 * MS, counters=counters, device=device)
            for at in range(10)
        ]
        labels = LABELS if rank < sampled_ranks else []
        trace = sampled(runs, labels, length_ns=200 * MS, spread=0, noise=0)
        kineto_trace.export_trace(replace(trace, target=replace(trace.target, rank=rank)), path / f"{rank}.json")
        sources.append(Source(path=path / f"{rank}.json", rank=rank))
    merge_traces(sources, path / name)
    return Context(kineto_trace.open_trace(path / name))


@pytest.mark.parametrize("name", ["m.json", "m.pftrace"])
@pytest.mark.parametrize("sampled_ranks", [1, 2])
def test_gpus_that_share_a_number_have_no_values_and_a_note(tmp_path: Path, name: str, sampled_ranks: int) -> None:
    context = merged(tmp_path, devices=(0, 0), sampled_ranks=sampled_ranks, name=name)
    for view in (gpu_counters, kernel_counters, roofline, throttling_spans, counters, counter_curves, counter_summary):
        result = view(context)
        assert result.notes[0] == MIXED, view.name
        for row in result.rows():
            assert row.get("mean") is None and row.get("value") is None and not row.get("samples")
            assert row.get("verdict", "not known") == "not known"
    ends = 2 if name.endswith(".pftrace") else 1  # it has the recorded window, in which the GPU is idle at the end, too
    assert [finding.name for finding in findings(context).findings] == ["unknown_idle"] * ends


@pytest.mark.parametrize("name", ["m.json", "m.pftrace"])
def test_gpus_with_numbers_of_their_own_have_their_values(tmp_path: Path, name: str) -> None:
    found = kernel_counters(merged(tmp_path, devices=(0, 1), name=name), counter="DRAM")
    values = {(row["name"], row["device"]): row["value"] for row in found.rows()}
    assert values == {("kernel0", 0): pytest.approx(80), ("kernel1", 1): pytest.approx(20)}
    assert found.notes == ()


def test_a_trace_of_power_alone_is_not_said_to_have_no_counters() -> None:
    runs = [Run(name="copy", start=0, duration=90 * MS, counters={"Power": 500})]
    found = counter_curves(Context(sampled(runs, ["Power"], length_ns=100 * MS)))
    assert found.notes == ("the trace has no percentage counters; the view 'counters' lists all counters",)
