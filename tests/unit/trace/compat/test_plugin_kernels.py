"""Rounding as Python does it. The plug-in's steps and roles."""

from typing import Any

import numpy as np
import pytest
from kineto_trace.compat.plugin_kernels import plugin_clock, plugin_roles, plugin_steps, rounded
from kineto_trace.model.context import Context
from support.trace_files import traces


def test_values_are_rounded_by_what_they_really_are() -> None:
    found = rounded(np.array([0.265, 2.675, 0.125, np.nan]), 2)
    assert found[:3].tolist() == [0.27, 2.67, 0.12]
    assert np.isnan(found[3])


def test_the_step_of_a_gpu_annotation_is_a_step_too() -> None:
    step = {"start": 0, "duration": 50_000, "name": "ProfilerStep#1"}
    context = Context(
        traces.trace(
            {
                "user_annotation": [step, {**step, "start": 60_000, "name": "ProfilerStep#02"}],
                "gpu_user_annotation": [{**step, "start": 10_000}],
            }
        )
    )
    found, clock = plugin_steps(context), plugin_clock(context)
    assert found.name == ("1", "1", "2")
    assert (clock.unix_ns(found.start) - traces.START_NS).tolist() == pytest.approx([0, 10_000, 60_000], abs=2)


def test_without_steps_one_lasts_as_long_as_operators_do() -> None:
    rows: dict[str, Any] = {
        "cpu_op": [
            {"name": "aten::a", "start": 5_000, "duration": 10_000},
            {"name": "b", "start": 0, "duration": 7_000},
        ],
        "user_annotation": [{"name": "long", "start": 0, "duration": 90_000}],
    }
    context = Context(traces.trace(rows))
    found = plugin_steps(context)
    assert found.name == ("0",)
    assert plugin_clock(context).us(found.end - found.start).tolist() == pytest.approx([15], abs=0.002)
    assert len(plugin_steps(Context(traces.trace({})))) == 0


def test_roles_by_external_ids_and_names() -> None:
    def at(start: int, name: str, **further: Any) -> dict[str, Any]:
        return {"name": name, "start": 1000 * start, "duration": 10_000, **further}

    trace = traces.trace(
        {
            "kernel": [
                at(0, "ncclDevKernel_AllReduce", external_id=7),
                at(100, "ncclDevKernel_AllGather", external_id=3),
                at(200, "gemm", external_id=7),
            ],
            "cuda_runtime": [at(300, "cudaLaunchKernel")],
            "cuda_driver": [at(400, "cuLaunchKernel")],
            "user_annotation": [at(500, "nccl:all_reduce", id=7), at(600, "nccl:all_to_all", id=3), at(650, "mine")],
            "gpu_user_annotation": [at(700, "gloo:broadcast"), at(800, "mine")],
            "cpu_op": [at(900, "enumerate(DataLoader)#It.__next__"), at(950, "enumerate(DataLoader)#It.next")],
        }
    )
    context = Context(trace)
    kernel, _, _, communication, runtime, loading, executing = plugin_roles(context)
    clock = plugin_clock(context)

    def begins(role: Any) -> list[int]:
        return [round(ns / 1000) for ns in (clock.unix_ns(role.start) - traces.START_NS).tolist()]

    assert begins(kernel) == [100]
    assert begins(communication) == [0, 200, 500, 700]
    assert begins(runtime) == [300]
    assert begins(loading) == [900]
    assert begins(executing) == [600, 650, 800, 950]
