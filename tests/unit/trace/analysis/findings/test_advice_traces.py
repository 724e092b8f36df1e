"""Small traces made for the purpose, on which a figure or an advice was wrong once."""

import lzma
from pathlib import Path

import pytest
from kineto_trace import run_view
from kineto_trace.analysis.cause_views import GPU_CAUSES, time_causes
from kineto_trace.analysis.findings.finding_views import findings, findings_view
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES
from kineto_trace.catalog.first_screen import first_screen_of
from kineto_trace.conversion.time_cut import cut
from kineto_trace.model.context import Context
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.snapshots.snapshot_reader import read_snapshot
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.trace_forms import with_current_forms
from support.trace_files.public_traces import public_paths

H200 = Path(__file__).parents[4] / "data" / "h200"
DATA = H200.with_name("advice")
US, MS = 1_000, 1_000_000


def opened(name: str) -> Context:
    return Context(open_trace(DATA / name)).get(with_current_forms)


def verdict(name: str) -> str:
    return first_screen_of([DATA / name]).verdict


def titles(context: Context) -> list[str]:
    return [row["title"] for row in findings_view(context).rows()]


def gpu_time(name: str) -> dict[str, float]:
    """The share (%) of each cause."""
    found = run_view("time_causes", DATA / name)
    return {row["cause"]: row["share_pct"] for row in found.rows()}


def launched_by(context: Context) -> dict[str, set[str]]:
    """The operators of each kernel."""
    activity, ops, strings = context.get(gpu), context.trace.table("cpu_op")["name"], context.trace.strings
    found: dict[str, set[str]] = {}
    for name, op in zip(activity.name.tolist(), activity.op.tolist(), strict=True):
        found.setdefault(strings[name], set()).add(strings[int(ops[op])] if op >= 0 else "")
    return found


def recordings(folder: Path) -> list[Path]:
    """All traces that are here, unpacked."""
    made = []
    for packed in (*H200.glob("*-kineto.json.xz"), *H200.glob("jax-*-xspace.xz")):
        made.append(folder / packed.name.removesuffix(".xz").replace("-xspace", ".xplane.pb"))
        made[-1].write_bytes(lzma.decompress(packed.read_bytes()))
    return [*DATA.glob("*.json.gz"), *DATA.glob("*.pb"), *H200.glob("ddp4/*.json.gz"), *made, *public_paths()]


def test_no_finding_saves_more_than_the_gpu_idles_and_computes_for_it(tmp_path: Path) -> None:
    judged, parts = 0, ((0, 1), (0, 0.5), (0.5, 1), (0.25, 0.75), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9), (0.05, 0.95))
    for path in recordings(tmp_path):
        whole = open_trace(path)
        start, length = whole.window_start_ns, whole.window_end_ns - whole.window_start_ns
        for first, last in parts:
            context = Context(cut(whole, start + int(first * length), start + int(last * length)))
            told, causes = context.get(findings), context.get(time_causes)
            idle, busy = (sum(causes.total(cause) for cause in kind) for kind in (IDLE_CAUSES, GPU_CAUSES))
            judged += 1
            for each in told.findings:
                owns = each.kernels or each.replayed or not set(each.causes) <= set(IDLE_CAUSES)
                most = min(idle + busy if owns else idle, told.window_ns) if idle + busy else told.window_ns
                assert each.guess or each.saving_ns <= most + US, (path.name, first, last, each)
    assert judged >= 150


def test_what_ran_before_the_measured_time_saves_none_of_it() -> None:
    context = opened("warmup_share.json.gz")
    told, idle = context.get(findings), context.get(time_causes).total(*IDLE_CAUSES)
    assert 10 * MS < told.window_ns < 12 * MS and idle < MS
    assert all(each.saving_ns <= idle + 15 * US for each in told.findings), told.findings
    assert all(each.saving_ns <= 0.014 * told.window_ns for each in told.findings if "prepare" in each.title)


def test_a_module_is_no_training() -> None:
    assert not any("training" in title for title in titles(opened("warmup_share.json.gz")))


def test_the_advice_on_serving_names_no_optimizer() -> None:
    for name in ("sglang_merged.json.gz", "BE.json.gz"):
        assert "optimizer" not in verdict(name)


def test_ids_of_two_ranks_are_apart() -> None:
    context = opened("sglang_merged.json.gz")
    assert launched_by(context) == {"gemm_kernel": {"aten::mm"}, "add_kernel": {"aten::add"}}
    activity = context.get(gpu)
    calls = context.trace.table("cuda_runtime")
    assert set((activity.start - calls["start"][activity.call]).tolist()) == {25 * US}


def test_calls_and_python_of_an_xla_profile_are_there_without_the_profiler_itself() -> None:
    context = opened("jax_calls.xplane.pb")
    activity, calls = context.get(gpu), context.trace.table("cuda_runtime")
    assert (activity.call >= 0).sum() == len(calls) == 10
    assert sorted((activity.start - calls.end()[activity.call]).tolist()) == [80 * US] * 10
    assert not any("stop_trace" in title for title in titles(context))
    assert not any("torch" in (row["advice"] or "") for row in findings_view(context).rows() if not row["guess"])


def test_an_impossible_occupancy_is_computed_again() -> None:
    (row,) = run_view("kernels", DATA / "occupancy_zero.json.gz").rows()
    assert round(row["occupancy_pct"]) == 19


def test_reading_an_attribute_of_a_compiled_kernel_is_no_compiling() -> None:
    assert not any("compiles" in title for title in titles(opened("triton_launch.json.gz")))


def test_resizing_an_image_waits_for_no_file() -> None:
    assert "input_output" not in gpu_time("pil_resize.json.gz")
    assert not any("file" in title for title in titles(opened("pil_resize.json.gz")))


def test_impossible_times_are_told_first() -> None:
    text = verdict("overflow_dur.json.gz")
    assert text.startswith("The times of this trace cannot be trusted: 5 kernels last until after later ones"), text
    shares = gpu_time("overflow_dur.json.gz")
    assert 70 < shares["matrix_products"] + shares["elementwise"] < 81


@pytest.mark.parametrize("name", ["warmup_share.json.gz", "sglang_merged.json.gz", "pil_resize.json.gz"])
def test_possible_times_are_trusted(name: str) -> None:
    assert "trusted" not in verdict(name)


def test_transfers_of_deepep_are_communication() -> None:
    shares = gpu_time("deepep.json.gz")
    assert (shares["communication"], shares["matrix_products"]) == (40.0, 20.0)  # 200 of 300 us are not hidden


def test_copies_and_fills_by_kernels_of_amds_runtime_are_no_computation() -> None:
    tables = opened("amd_copy.json.gz").trace.tables
    took = {kind: int(tables[kind]["duration"].sum()) for kind in ("gpu_memcpy", "gpu_memset", "kernel")}
    assert took == {"gpu_memcpy": 100 * US, "gpu_memset": 50 * US, "kernel": 150 * US}


def test_kernels_of_begin_and_end_events_are_kernels() -> None:
    context = opened("BE.json.gz")
    kernels = context.trace.table("kernel")
    assert (len(kernels), int(kernels["duration"].sum())) == (4, 160 * US)
    assert launched_by(context) == {f"kern{number}": {f"aten::op{number}"} for number in range(4)}


def test_a_duration_that_cannot_be_is_told() -> None:
    notes = open_trace(DATA / "dur1e20b.json.gz").notes
    assert notes == ("1 GPU activity has no possible duration and cannot be evaluated",)


def test_a_snapshot_may_have_addresses_beyond_2_to_the_63() -> None:
    (segment,) = read_snapshot(DATA / "snap_big.pickle").segments
    assert segment.address >= 1 << 63 and segment.size == 2 << 20
