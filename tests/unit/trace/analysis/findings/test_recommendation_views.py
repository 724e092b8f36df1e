"""Each rule just below and just above its threshold."""

from collections.abc import Mapping
from typing import Any

import pytest
from kineto_trace.analysis.findings.recommendation_views import recommendations
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Compat
from support.trace_files import traces

BUSY = {"name": "s1688gemm", "start": 0, "duration": 1_000_000, "external_id": 5}  # a GPU with enough to do
STEP = {"name": "ProfilerStep#1", "start": 0, "duration": 1_000_000, "id": 1, "finished": 1}
GPU = {"id": 0, "computeMajor": 9, "computeMinor": 0, "totalGlobalMem": 1000}


def rules(tables: Mapping[str, Any], compat: Compat = Compat.NONE, **changes: Any) -> dict[str, Any]:
    step = {"user_annotation": [STEP, *tables.get("user_annotation", [])]}
    result = recommendations(Context(traces.trace({"kernel": [BUSY], **tables, **step}, **changes)), compat=compat)
    return {row["rule"]: row for row in result.rows()}


BOTH = pytest.mark.parametrize("compat", [Compat.NONE, Compat.PLUGIN])


@BOTH
def test_nothing_to_recommend(compat: Compat) -> None:
    assert rules({}, compat) == {}


@BOTH
@pytest.mark.parametrize(("share", "found"), [(0.049, False), (0.051, True)])
def test_data_loading(compat: Compat, share: float, found: bool) -> None:
    load = {"name": "enumerate(DataLoader)#It.__next__", "start": 0, "duration": int(1_000_000 * share), "id": 2}
    busy = {**BUSY, "start": 100_000, "duration": 900_000}
    result = rules({"kernel": [busy], "user_annotation": [load]}, compat)
    assert ("data_loading" in result) is found
    if found:
        assert result["data_loading"]["value"] == pytest.approx(5.1, abs=1e-3)
        assert (result["data_loading"]["threshold"], result["data_loading"]["unit"]) == (5, "%")


@BOTH
def test_data_parallel_on_two_gpus(compat: Compat) -> None:
    forward = [{"name": "DataParallel.forward", "start": 0, "duration": 10, "id": 2}]
    assert "data_parallel" not in rules({"cpu_op": forward}, compat)
    result = rules({"cpu_op": forward, "kernel": [BUSY, {**BUSY, "device": 1}]}, compat)
    assert result["data_parallel"]["value"] == 2


@BOTH
def test_nccl_for_distributed_training_on_gpus(compat: Compat) -> None:
    forward = {"name": "DistributedDataParallel.forward", "start": 0, "duration": 10, "id": 2}
    gloo = {"name": "gloo:all_reduce", "start": 0, "duration": 10, "id": 3}
    tables = {"user_annotation": [forward, gloo]}
    assert "nccl_backend" not in rules(tables, compat, devices=({**GPU, "computeMajor": 3, "computeMinor": 2},))
    assert rules(tables, compat, devices=(GPU,))["nccl_backend"]["value"] == 9
    nccl = {**gloo, "name": "nccl:all_reduce"}
    assert "nccl_backend" not in rules({"user_annotation": [forward, nccl]}, compat, devices=(GPU,))


def test_communication_is_told_by_kernels() -> None:
    compute = {**BUSY, "duration": 890_000}
    nccl = {"name": "ncclDevKernel_AllReduce", "start": 890_000, "duration": 110_000, "external_id": 8}
    assert rules({"kernel": [compute, nccl]})["communication"]["value"] == pytest.approx(11)
    assert "communication" not in rules({"kernel": [compute, nccl]}, Compat.PLUGIN)
    ranges = [{"name": "nccl:all_reduce", "start": 0, "duration": 10, "id": 8}]
    assert "communication" in rules({"kernel": [compute, nccl], "user_annotation": ranges}, Compat.PLUGIN)
    assert "communication" not in rules({"kernel": [compute, {**nccl, "duration": 100_000}]})


@BOTH
def test_low_utilization(compat: Compat) -> None:
    assert "low_utilization" not in rules({"kernel": [{**BUSY, "duration": 501_000}]}, compat)
    result = rules({"kernel": [BUSY, {**BUSY, "device": 1, "duration": 499_000}]}, compat)
    assert result["low_utilization"]["value"] == pytest.approx(49.9, abs=0.01)
    assert result["low_utilization"]["evidence"] == "utilization of GPU 1: 49.9 %"


def matmul(kernel: str) -> dict[str, Any]:
    launch = {"name": "cudaLaunchKernel", "start": 1, "duration": 5, "correlation": 3, "external_id": 5}
    return {
        "cpu_op": [{"name": "aten::mm", "start": 0, "duration": 100, "id": 5}],
        "cuda_runtime": [launch],
        "kernel": [{**BUSY, "name": kernel, "correlation": 3}],
    }


def test_tensor_cores_that_nothing_uses() -> None:
    assert rules(matmul("sgemm"), devices=(GPU,))["tensor_cores"]["value"] == 100
    assert rules(matmul("sgemm"), Compat.PLUGIN, devices=(GPU,))["tensor_cores"]["value"] == 100
    assert "tensor_cores" not in rules(matmul("sgemm"), devices=({**GPU, "computeMajor": 6},))
    assert "tensor_cores" not in rules(matmul("nvjet_tst"), devices=(GPU,))
    assert "tensor_cores" in rules(matmul("nvjet_tst"), Compat.PLUGIN, devices=(GPU,))


def test_the_advice_is_what_the_gpu_can_follow() -> None:
    volta = {**GPU, "computeMajor": 7}
    assert "neither bfloat16 nor TF32" in rules(matmul("sgemm"), devices=(volta,))["tensor_cores"]["advice"]
    assert "TF32" in rules(matmul("sgemm"), devices=(GPU,))["tensor_cores"]["advice"]
    short = {"kernel": [{**BUSY, "duration": 100_000}]}
    assert "torch.compile" in rules(short, devices=(volta,))["low_utilization"]["advice"]
    assert "torch.compile" not in rules(short, devices=({**GPU, "computeMajor": 6},))["low_utilization"]["advice"]
    plugin = [rules(matmul("sgemm"), Compat.PLUGIN, devices=(each,))["tensor_cores"]["advice"] for each in (volta, GPU)]
    assert plugin[0] == plugin[1]


def test_the_plugin_looks_at_the_first_gpu_only() -> None:
    tables = matmul("sgemm")
    tables["kernel"][0]["device"] = 1
    devices = ({**GPU, "computeMajor": 6}, {**GPU, "id": 1})
    assert "tensor_cores" in rules(tables, devices=devices)
    assert "tensor_cores" not in rules(tables, Compat.PLUGIN, devices=devices)


@BOTH
@pytest.mark.parametrize(("peak", "found"), [(900, False), (901, True)])
def test_memory_that_is_almost_full(compat: Compat, peak: int, found: bool) -> None:
    event = {"name": "[memory]", "device_type": 1, "device": 0, "total_allocated": peak}
    result = rules({"cpu_instant_event": [event]}, compat, devices=(GPU,))
    assert ("memory" in result) is found


def test_the_plugin_compares_the_memory_of_cpus_with_the_last_gpu() -> None:
    event = {"name": "[memory]", "device_type": 0, "device": -1, "total_allocated": 5_000}
    assert "memory" not in rules({"cpu_instant_event": [event]}, devices=(GPU,))
    assert rules({"cpu_instant_event": [event]}, Compat.PLUGIN, devices=(GPU,))["memory"]["value"] == 500
