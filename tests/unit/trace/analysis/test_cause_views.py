"""Where the time of the steps goes, by causes, and what that of traces without GPU activity went to.

Times in these traces are microseconds.
"""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace import run_views
from kineto_trace.analysis.cause_views import (
    CAUSES,
    HOST_CAUSES,
    OF_THE_HOST,
    TITLES,
    host_causes,
    rank_time_causes,
    time_causes_view,
)
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.idle_gaps import measured_steps
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.view_api.result import Result
from support.trace_files.cause_checks import wrong
from support.trace_files.sampled_stacks import FORWARD, MAIN, sampled
from support.trace_files.traces import H100, START_NS, target, trace
from support.trace_files.training_ranks import Job, write_job

Row = dict[str, Any]
H200 = Path(__file__).parents[3] / "data" / "h200"
MS = 1_000_000
SAVES = (*MAIN, "/job/a.py(3): save")
US = 1000


def row(name: str, start: int, end: int, **more: Any) -> Row:
    return {"name": name, "start": start * US, "duration": (end - start) * US, **more}


def shares(context: Context, **options: Any) -> dict[str, float]:
    return {each["cause"]: each["total_us"] for each in time_causes_view(context, **options).rows()}


def test_while_the_gpu_works_the_most_useful_work_counts() -> None:
    kernels = [
        row("sgemm", 0, 100, stream=1),
        row("vectorized_elementwise_kernel", 50, 200, stream=2),
        row("softmax", 150, 250, stream=3),
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 200, 400, stream=4),
    ]
    copies = [
        row("Memcpy HtoD (Pageable -> Device)", 350, 500, stream=5),
        row("Memcpy HtoD (Pinned -> Device)", 450, 600, stream=6),
        row("Memcpy DtoD (Device -> Device)", 550, 700, stream=7),
        row("CopyHostToDevice", 650, 800, stream=7),
    ]
    fills = [row("Memset (Device)", 700, 1000, stream=8)]
    context = Context(trace({"kernel": kernels, "gpu_memcpy": copies, "gpu_memset": fills}, length_ns=1000 * US))
    assert shares(context) == {
        "matrix_products": 100.0,
        "elementwise": 100.0,
        "other_kernels": 50.0,
        "communication": 150.0,
        "pageable_copies": 100.0,
        "pinned_copies": 100.0,
        "device_copies": 100.0,
        "other_copies": 100.0,
        "fills": 200.0,
    }


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int, int const*)", "other_kernels"),
        ("void split_embedding_forward_kernel<float>(fbgemm_gpu::enum_placement const*)", "other_kernels"),
        ("void fbgemm_gpu::grouped::gemm_kernel<float>(float*)", "matrix_products"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(__nv_bfloat16 const*)", "other_kernels"),
        ("SubTensorOpWithScalar1d", "other_kernels"),
        ("cask_cudnn::computeWgradSplitKOffsetsKernel(cask_cudnn::ComputeSplitKOffsetsParams)", "other_kernels"),
        ("triton_red_fused__unsafe_view_matmul_native_layer_norm_19", "other_kernels"),
        ("void tensorrt_llm::ConvertLayout<float>(float*)", "other_kernels"),
        ("volta_scudnn_128x64_stridedB_interior_nn_v1", "matrix_products"),
        ("attn_fwd.kd", "matrix_products"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_sm100f", "matrix_products"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "matrix_products"),
    ],
)
def test_what_a_kernel_computes_is_told_by_its_name(name: str, cause: str) -> None:
    assert shares(Context(trace({"kernel": [row(name, 0, 100)]}, length_ns=100 * US))) == {cause: 100.0}


def test_what_was_not_recorded_is_neither_work_nor_idle() -> None:
    rows = {
        "kernel": [row("sgemm", 0, 100, correlation=1), row("sgemm", 900, 1000, correlation=2)],
        "cuda_runtime": [row("cudaLaunchKernel", 850, 855, correlation=2, thread=1)],
        "cpu_op": [row("aten::mm", 0, 1000, thread=1, id=1, finished=1)],
    }
    missing = ((START_NS + 300 * US, START_NS + 700 * US),)
    lost = SourceCoverage(source="cupti", kinds=("kernel", "gpu_memcpy", "gpu_memset"), missing=missing)
    found = shares(Context(trace(rows, length_ns=1000 * US, coverage=(lost,))))
    assert (found["unrecorded"], sum(found.values())) == (400.0, 1000.0)
    assert found["operators"] == 350.0  # until the record ends, and from its beginning to the launch
    assert "unrecorded" not in shares(Context(trace(rows, length_ns=1000 * US)))


def stepping(lengths: list[int]) -> Context:
    """Steps, each with a kernel in its last 10 us, and the host in an operator before."""
    ends = np.cumsum(lengths).tolist()
    steps = [row(f"ProfilerStep#{n}", end - length, end, thread=1, id=n + 1, finished=1)
             for n, (length, end) in enumerate(zip(lengths, ends, strict=True))]  # fmt: skip
    ops = [row("aten::mm", end - length, end - 9, thread=1, id=100 + n, finished=1)
           for n, (length, end) in enumerate(zip(lengths, ends, strict=True))]  # fmt: skip
    kernels = [row("sgemm", end - 10, end, correlation=n + 1) for n, end in enumerate(ends)]
    calls = [row("cudaLaunchKernel", end - 12, end - 11, correlation=n + 1, thread=1) for n, end in enumerate(ends)]
    rows = {"kernel": kernels, "cuda_runtime": calls, "cpu_op": ops, "user_annotation": steps}
    return Context(trace(rows, length_ns=sum(lengths) * US))


def test_a_step_is_the_mean_of_the_steps_that_are_no_warm_up() -> None:
    context = stepping([10_000, 100, 110, 90])
    result = time_causes_view(context)
    assert [(each["cause"], each["total_us"], each["step_us"], each["what"]) for each in result.rows()] == [
        ("operators", 264.0, 88.0, "aten::mm"),
        ("matrix_products", 30.0, 10.0, None),
        ("launch_latency", 6.0, 2.0, "aten::mm"),
    ]
    assert result.notes == (
        "long first steps, 97 % of the trace, are left out of means and savings: step 0 (10 ms; the others take 100 "
        "µs)",
    )
    assert shares(context, warm_up=True) == {"operators": 10252.0, "matrix_products": 40.0, "launch_latency": 8.0}


def test_a_slow_first_step_is_no_finding() -> None:
    found = stepping([10_000, 100, 110, 90]).get(findings)
    assert (found.window_ns, found.steps) == (300 * US, 3)
    assert found.findings[0].name == "host_bound"
    assert found.findings[0].saving_ns == 268 * US  # but for the time from a launch to its kernel


def test_details_have_a_row_for_each_operator() -> None:
    ops = [row("aten::a", 0, 300, thread=1, id=1, finished=1), row("aten::b", 300, 980, thread=1, id=2, finished=1)]
    rows = {
        "kernel": [row("sgemm", 1000, 1100, correlation=1)],
        "cuda_runtime": [row("cudaLaunchKernel", 980, 990, correlation=1, thread=1)],
        "cpu_op": ops,
    }
    context = Context(trace(rows, length_ns=1100 * US))
    listed = [(each["cause"], each["what"], each["total_us"]) for each in time_causes_view(context, detail=True).rows()]
    assert listed == [
        ("operators", "aten::b", 680.0),
        ("operators", "aten::a", 300.0),
        ("matrix_products", None, 100.0),
        ("launch_latency", "cudaLaunchKernel", 20.0),
    ]


def test_a_trace_without_gpu_activity_says_so() -> None:
    result = time_causes_view(Context(trace({})))
    assert (result.rows(), result.notes) == ([], ("the trace has no GPU activity",))


def test_every_cause_has_a_title() -> None:
    assert sorted(TITLES) == sorted(CAUSES)


def anything(seed: int) -> Context:
    """A trace of random events on 2 GPUs and 3 threads, often wrong: overlapping, without launches, out of steps."""
    random = np.random.default_rng(seed)

    def events(names: list[str], count: int, longest: int, **columns: int) -> list[Row]:
        return [
            {
                "name": str(random.choice(names)),
                "start": int(random.integers(-200_000, 1_200_000)),
                "duration": int(random.integers(0, longest)),
                **{name: int(random.integers(0, most)) for name, most in columns.items()},
            }
            for _ in range(random.integers(0, count))
        ]

    ops = ["aten::mm", "gloo:all_reduce", "enumerate(DataLoader)#_X.__next__", "ProfilerStep#7", "Optimizer.step#S"]
    calls = ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMalloc", "cudaMemcpy", "cudaGraphLaunch"]
    python = ["train.py(1): main", "<built-in function sleep>", "torch/utils/data/dataloader.py(1): __next__",
              "queue.py(1): get", "torch/autograd/graph.py(1): _engine_run_backward"]  # fmt: skip
    sampled = {"samples": 4, "self_samples": 4, "idle": 2, "running": 2, "waiting": 2} if seed % 2 else {}
    rows = {
        "kernel": events(["sgemm", "ncclDevKernel_X", "elementwise_kernel"], 60, 40_000, device=2, correlation=40),
        "gpu_memcpy": events(["Memcpy HtoD (Pageable -> Device)", "DtoD"], 20, 30_000, device=2, correlation=40),
        "gpu_memset": events(["Memset"], 5, 9_000, device=2, correlation=40),
        "cuda_runtime": events(calls, 60, 80_000, thread=3, correlation=40),
        "cpu_op": events(ops, 40, 200_000, thread=3, finished=2),
        "user_annotation": [
            {**each, "name": f"ProfilerStep#{n}"} for n, each in enumerate(events(["x"], 5, 500_000, thread=2))
        ],
        "python_function": events(python, 40, 300_000, thread=3, **sampled),
    }
    return Context(trace(rows, length_ns=1_000_000, sample_period_ns=20_000 if sampled else 0, devices=[H100]))


@pytest.mark.parametrize("seed", range(60))
def test_the_causes_of_any_trace_sum_to_its_steps(seed: int) -> None:
    assert wrong(anything(seed)) == []


@pytest.mark.parametrize("name", ["rank0", "rank1", "rank2", "rank3"])
def test_the_causes_of_a_recorded_training_sum_to_its_steps(name: str) -> None:
    assert wrong(Context(open_trace(H200 / "ddp4" / f"{name}.json.gz"))) == []


@pytest.mark.parametrize("name", ["mlp", "graph", "streams"])
def test_the_causes_of_what_kineto_recorded_sum_to_its_steps(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(lzma.decompress((H200 / f"{name}-kineto.json.xz").read_bytes()))
    context = Context(open_trace(path))
    assert wrong(context) == []
    assert time_causes_view(context).rows()


def kernels(*times: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {"name": "k", "start": start * MS, "duration": (end - start) * MS, "correlation": n + 1}
        for n, (start, end) in enumerate(times)
    ]


def test_without_steps_what_happens_once_at_the_beginning_is_warm_up() -> None:
    """CUDA is initialised for 5 s, and the first convolution takes 3 s; then there is a kernel each 10 ms."""
    steady = [(8100 + 10 * n, 8105 + 10 * n) for n in range(50)]
    made = trace({"kernel": kernels((5000, 5001), (8001, 8002), *steady)}, length_ns=8600 * MS)
    found = Context(made).get(measured_steps)
    assert (found.start - START_NS).tolist() == [0, 8001 * MS]
    assert found.left_out.tolist() == [True, False]
    assert found.measured_ns == 599 * MS
    note = found.note()
    assert note is not None and note.startswith(
        "the first 8 s, 93 % of the trace, are left out: they end with a gap that does not recur"
    )


def test_gaps_that_recur_are_no_warm_up() -> None:
    made = trace({"kernel": kernels(*((1000 * n + 900, 1000 * n + 1000) for n in range(4)))}, length_ns=4000 * MS)
    found = Context(made).get(measured_steps)
    assert (len(found.start), found.note(), found.measured_ns) == (1, None, 4000 * MS)


def test_an_empty_trace_has_no_warm_up_to_tell_of() -> None:
    assert measured_steps(Context(trace({}, length_ns=0))).note() is None


def op(name: str, start_ms: int, end_ms: int, **values: int) -> dict[str, Any]:
    return {"name": name, "start": start_ms * MS, "duration": (end_ms - start_ms) * MS, "thread": 1, **values}


def training() -> Context:
    """One step of 100 ms, whose code saves something at 30 to 60 ms."""
    return sampled([FORWARD] * 3 + [SAVES] * 3 + [FORWARD] * 4, ops=OPS, annotations=ANNOTATIONS)


def test_the_parts_of_the_host_s_steps_sum_to_the_whole() -> None:
    result = time_causes_view(training())
    rows = result.rows()
    assert {row["cause"]: row["step_us"] / 1000 for row in rows} == {
        "host_other": 65,
        "host_loading": 10,
        "host_forward": 10,
        "host_optimizer": 10,
        "host_backward": 5,
    }
    assert sum(row["share_pct"] for row in rows) == pytest.approx(100)
    assert {row["cause"] for row in rows} == set(HOST_CAUSES)
    assert {row["device"] for row in rows} == {None}
    assert result.notes == (OF_THE_HOST,)


def test_the_program_s_own_code_is_shown_by_the_line_with_most_of_it() -> None:
    first = time_causes_view(training()).rows()[0]
    assert (first["cause"], first["what"]) == ("host_other", "save (/job/a.py:42)")


def test_small_parts_are_one_row() -> None:
    rows = time_causes_view(training(), least=10.5).rows()
    assert [(row["cause"], row["share_pct"]) for row in rows] == [("host_other", 65), ("others", 35)]


def test_with_gpu_activity_it_is_the_gpu_s_time_that_is_told() -> None:
    rows = {"cpu_op": [op("aten::mm", 0, 5)], "kernel": [{"name": "sgemm", "start": 0, "duration": 5 * MS}]}
    context = Context(trace(rows, length_ns=10 * MS))
    assert host_causes(context).causes == ()
    assert {row["device"] for row in time_causes_view(context).rows()} == {0}


def test_a_job_without_gpus_has_the_parts_of_all_its_hosts() -> None:
    partials = [(number, rank_time_causes.partial(training())) for number in (0, 1)]
    found = rank_time_causes.combine(partials)
    assert sum(row["share_pct"] for row in found.rows()) == pytest.approx(100)
    assert (found.rows()[0]["cause"], found.rows()[0]["what"]) == ("host_other", "save (/job/a.py:42)")
    assert found.notes == (OF_THE_HOST,)


def test_ranks_without_a_gpu_do_not_count_beside_ranks_with_one() -> None:
    rows = {"kernel": [{"name": "sgemm", "start": 0, "duration": 5 * MS}]}
    partials = [
        (0, rank_time_causes.partial(training())),
        (1, rank_time_causes.partial(Context(trace(rows, length_ns=5 * MS)))),
    ]
    found = rank_time_causes.combine(partials)
    assert [row["cause"] for row in found.rows()] == ["matrix_products"]
    assert found.notes == ("rank 0: the trace has no GPU activity",)


def rank(number: int, *kernels: tuple[str, int, int], steps: tuple[int, ...] = (1000,)) -> Context:
    """Kernels (name, start, end), in steps of these lengths."""
    rows: dict[str, list[dict[str, Any]]] = {
        "kernel": [{"name": name, "start": a * US, "duration": (b - a) * US} for name, a, b in kernels]
    }
    ends = [sum(steps[: n + 1]) for n in range(len(steps))]
    rows["user_annotation"] = [
        {"name": f"ProfilerStep#{n}", "start": (end - length) * US, "duration": length * US, "id": n + 1, "finished": 1}
        for n, (length, end) in enumerate(zip(steps, ends, strict=True))
    ]
    return Context(trace(rows, target=target(rank=number), length_ns=sum(steps) * US), rank=number)


def over(*contexts: Context, **options: Any) -> Result:
    partials = [(context.rank, rank_time_causes.partial(context)) for context in contexts]
    return rank_time_causes.combine(partials, **options)


def test_the_causes_of_all_ranks_sum_to_the_whole_and_name_the_ranks_with_most_and_least() -> None:
    contexts = [rank(0, ("sgemm", 0, 900)), rank(1, ("sgemm", 0, 500)), rank(2, ("sgemm", 0, 700))]
    rows = {row["cause"]: row for row in over(*contexts).rows()}
    assert sum(row["share_pct"] for row in rows.values()) == pytest.approx(100)
    row = rows["matrix_products"]
    assert (row["share_pct"], row["step_us"], row["total_us"]) == (pytest.approx(70), 700, 2100)
    assert (row["least_pct"], row["least_rank"], row["most_pct"], row["most_rank"]) == (50, 1, 90, 0)
    assert row["meaning"] == "GPU computes: matrix products, convolutions, attention"


def test_a_rank_s_share_is_of_its_own_time_however_long_it_took() -> None:
    (row, *_) = over(rank(0, ("sgemm", 0, 1000)), rank(1, ("sgemm", 0, 1500), steps=(3000,))).rows()
    others = {row["cause"]: row for row in over(rank(1, ("sgemm", 0, 1500), steps=(3000,))).rows()}
    assert (row["share_pct"], row["most_pct"], row["least_pct"]) == (62.5, 100, 50)
    assert others["matrix_products"]["share_pct"] == 50


def test_small_causes_are_one_row_only_if_they_are_small_on_every_rank() -> None:
    contexts = [rank(0, ("sgemm", 0, 995), ("softmax", 995, 1000)), rank(1, ("sgemm", 0, 900), ("Memset", 900, 1000))]
    assert {row["cause"] for row in over(*contexts).rows()} == {"matrix_products", "other_kernels"}
    contexts = [rank(0, ("sgemm", 0, 995), ("softmax", 995, 1000)), rank(1, ("sgemm", 0, 1000))]
    (_, row) = over(*contexts, least=1.0).rows()
    assert (row["cause"], row["share_pct"], row["most_pct"], row["least_pct"]) == ("other_kernels", 0.25, 0.5, 0)


def test_a_rank_without_gpu_activity_is_named_and_counts_for_nothing() -> None:
    found = over(rank(0, ("sgemm", 0, 1000)), rank(1))
    assert [(row["cause"], row["least_rank"]) for row in found.rows()] == [("matrix_products", 0)]
    assert found.notes == ("rank 1: the trace has no GPU activity",)
    assert (len(over(rank(1))), over(rank(1)).notes) == (0, ("rank 1: the trace has no GPU activity",))


def test_it_is_the_sum_of_what_each_rank_has(tmp_path: Any) -> None:
    paths = write_job(tmp_path, Job(ranks=4, per_host=2, steps=3, layers=2, slow={3: 1.3}))
    each, together = run_views([time_causes_view.name, rank_time_causes.name], paths)
    total: dict[str, float] = {}
    for row in each.rows():
        total[row["cause"]] = total.get(row["cause"], 0.0) + row["total_us"]
    assert {row["cause"]: row["total_us"] for row in together.rows()} == pytest.approx(total)
    products = next(row for row in together.rows() if row["cause"] == "matrix_products")
    assert products["most_rank"] == 3


OPS = [
    op("aten::linear", 20, 30, sequence=7, torch_thread=1),
    op("autograd::engine::evaluate_function: LinearBackward0", 60, 65, sequence=7, forward_thread=1),
]
ANNOTATIONS = [
    op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
    op("Optimizer.step#SGD.step", 80, 90),
]
