from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from kineto_trace.compat.plugin_tree import (
    PLUGIN_KERNELS,
    microseconds,
    orderable,
    plugin_eligible_names,
    plugin_tensor_names,
    plugin_tree,
    plugin_uses_tensor_cores,
)
from kineto_trace.kernel_traits.precisions import AUTOCAST_OPS
from kineto_trace.model.context import Context
from support.trace_files import traces
from support.trace_files.traces import trace

Row = dict[str, Any]
FFMA = "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel"


@dataclass
class Plain:
    """A node of the tree as a plain walk builds it."""

    name: str
    start: int
    end: int
    external: int
    children: list["Plain"] = field(default_factory=list)


def walk(rows: list[Row]) -> list[Plain]:
    """The rules one by one: sort, contain or drop, merge only children of the same name."""
    root = Plain("", -1, 1 << 60, -1)
    stack = [root]
    for row in sorted(rows, key=lambda row: (row["start"], -row["duration"])):
        node = Plain(row["name"], row["start"], row["start"] + row["duration"], row["id"])
        while node.start >= stack[-1].end:
            stack.pop()
        if node.end <= stack[-1].end:
            stack[-1].children.append(node)
            stack.append(node)
    return [merged(child) for child in root.children]


def merged(node: Plain) -> Plain:
    while len(node.children) == 1 and node.children[0].name == node.name:
        node.external, node.children = node.children[0].external, node.children[0].children
    node.children = [merged(child) for child in node.children]
    return node


def in_preorder(nodes: list[Plain]) -> list[Plain]:
    return [each for node in nodes for each in [node, *in_preorder(node.children)]]


def device_total(node: Plain, device: dict[int, int]) -> int:
    return device.get(node.external, 0) + sum(device_total(child, device) for child in node.children)


@pytest.mark.parametrize("seed", range(40))
def test_random_overlapping_operators_make_the_tree_that_a_plain_walk_makes(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(int(random.integers(1, 60))):
        start, length = int(random.integers(0, 60)) * 1000, int(random.integers(1, 40)) * 1000
        rows.append({"start": start, "duration": length, "name": f"op{random.integers(0, 2)}", "id": number + 1})
    chosen = [int(each) for each in random.integers(1, len(rows) + 1, 20)]
    calls = [{"start": 0, "duration": 1, "correlation": n + 1, "external_id": each} for n, each in enumerate(chosen)]
    kernels = [{"start": 0, "duration": 1000 * (n + 1), "correlation": n + 1} for n in range(len(chosen))]
    device: dict[int, int] = {}
    for n, each in enumerate(chosen):
        device[each] = device.get(each, 0) + n + 1
    expected = in_preorder(walk(rows))
    rows = [{"thread": 1, "finished": 1, "inputs": -1, "sequence": -1, **row} for row in rows]
    context = Context(trace({"cpu_op": rows, "cuda_runtime": calls, "kernel": kernels}))
    found = context.get(plugin_tree)
    names = [context.trace.strings[number] for number in found.name.tolist()]
    assert names == [node.name for node in expected]
    assert (found.end - found.start).tolist() == pytest.approx(
        [(node.end - node.start) / 1000 for node in expected], abs=2e-3
    )
    assert found.device_total.tolist() == pytest.approx([device_total(node, device) for node in expected])
    in_children = [sum(child.end - child.start for child in node.children) / 1000 for node in expected]
    in_calls = [chosen.count(node.external) / 1000 for node in expected]
    host_self = [t - c - k for t, c, k in zip(found.end - found.start, in_children, in_calls, strict=True)]
    assert found.host_self.tolist() == pytest.approx(host_self, abs=0.02)


def test_times_are_the_doubles_that_the_file_gives() -> None:
    texts = ["4306452651095.381", "4306452651095.999", "0.001", "1623143089861790"]
    ns = np.array([int(text.replace(".", "")) * (1 if "." in text else 1000) for text in texts])
    assert microseconds(ns).tolist() == [float(text) for text in texts]


def test_doubles_of_both_signs_keep_their_order_as_integers() -> None:
    times = np.array([-3.5, -0.0, 0.0, 1e-9, 2.0, 4.3e12])
    assert (np.diff(orderable(times)) >= 0).all()
    assert len(np.unique(orderable(times))) == 5


def test_the_first_thread_by_time_has_the_call_if_two_nodes_have_its_external_id() -> None:
    first = {"start": 5000, "duration": 1000, "name": "late", "thread": 1, "id": 7, "finished": 1}
    other = {"start": 1000, "duration": 1000, "name": "early", "thread": 2, "id": 7, "finished": 1}
    rows = [{"inputs": -1, "sequence": -1, **row} for row in (first, other)]
    call = {"start": 5100, "duration": 1, "thread": 1, "correlation": 1, "external_id": 7}
    kernel = {"start": 9000, "duration": 1000, "correlation": 1}
    context = Context(trace({"cpu_op": rows, "cuda_runtime": [call], "kernel": [kernel]}))
    found = context.get(plugin_tree)
    names = [context.trace.strings[number] for number in found.name.tolist()]
    assert dict(zip(names, found.device_self.tolist(), strict=True)) == {"early": 1.0, "late": 0.0}


def test_the_plugin_misses_hopper_and_takes_ffma_for_tensor_cores() -> None:
    assert len(PLUGIN_KERNELS) == 18
    assert plugin_uses_tensor_cores(FFMA)
    assert not plugin_uses_tensor_cores("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN")


def test_names_are_judged_once_per_string() -> None:
    names = [
        "aten::mm",
        "aten::add",
        "nvjet_x",
        FFMA,
        "autograd::engine::evaluate_function: MmBackward0",
        "BmmBackward0",
    ]
    context = Context(traces.trace({}, strings=tuple(names)))
    assert np.flatnonzero(plugin_tensor_names(context)).tolist() == [3]
    assert np.flatnonzero(plugin_eligible_names(context)).tolist() == [0, 5]
    assert len(AUTOCAST_OPS) == 45
