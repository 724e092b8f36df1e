"""Kernels learn which HLO instruction they ran; where several would do, what these have in common, and nothing else."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kineto_trace.decode import xplane_profile
from kineto_trace.decode.hlo_modules import parts, read_module
from kineto_trace.model.trace import StringTable, Table
from kineto_trace.structure import hlo_kernels
from kineto_trace.structure.hlo_kernels import with_hlo
from support.trace_files import traces
from support.xla.messages import Op, module, recorded, source

A = module("jit_a", {1: [Op("dot.1", alike="dot.1"), Op("add.2"), Op("dot.3", alike="dot.1"), Op("mul.4")]})
B = module("jit_b", {1: [Op("dot.1"), Op("sub.5")]})
LOOP = module(
    "jit_loop",
    {
        1: [Op("first"), Op("while.9", "while", called=(2, 3)), Op("last")],
        2: [Op("body.1"), Op("gemm", "custom-call"), Op("body.2")],
        3: [Op("less")],
    },
)


def named(modules: Sequence[bytes], names: Sequence[str], **columns: Any) -> list[str]:
    """The operation and module of each of these kernels, which are launched in this order."""
    rows = [
        {"name": name, "start": number, "duration": 1, "correlation": number + 1, "hlo": ""}
        | {key: values[number] for key, values in columns.items()}
        for number, name in enumerate(names)
    ]
    strings = StringTable()
    tables = with_hlo(
        {"kernel": traces.table("kernel", rows, strings)}, [read_module(each) for each in modules], strings
    )
    return [said(strings, number) for number in tables["kernel"]["hlo"].tolist()]


def said(strings: StringTable, number: int) -> str:
    found = json.loads("{" + strings.strings[number] + "}") if number >= 0 else {}
    return f"{found.get('hlo_module', '')} {found.get('hlo_op', '')}".strip()


def test_a_kernel_that_several_instructions_share_is_told_by_its_place() -> None:
    assert named([A], ["dot_1", "add_2", "dot_1", "mul_4"]) == [
        "jit_a dot.1",
        "jit_a add.2",
        "jit_a dot.3",
        "jit_a mul.4",
    ]


def test_kernels_of_the_same_name_are_told_by_what_surrounds_them() -> None:
    found = named([A, B], ["dot_1", "sub_5", "dot_1", "add_2", "dot_1", "mul_4", "dot_1", "sub_5"])
    assert [found[0], found[2], found[6]] == ["jit_b dot.1", "jit_a dot.1", "jit_b dot.1"]


def test_what_may_have_run_two_instructions_has_only_what_both_have() -> None:
    assert named([A], ["dot_1"]) == ["jit_a"]
    assert named([A, B], ["dot_1"]) == [""]


def test_a_librarys_kernels_belong_to_the_only_instruction_at_that_place() -> None:
    library = module("jit_a", {1: [Op("f.1"), Op("conv", "custom-call"), Op("f.2"), Op("x", "sort"), Op("y", "fft")]})
    assert named([library], ["f_1", "sm90_gemm", "cudnn_part_2", "f_2", "thrust_sort"]) == [
        "jit_a f.1",
        "jit_a conv",
        "jit_a conv",
        "jit_a f.2",
        "jit_a",
    ]


def test_loops_go_round_as_often_as_they_do() -> None:
    turn = ["less", "body_1", "sm90_gemm", "body_2"]
    found = named([LOOP], ["first", *turn * 3, "less", "last", "first", "less", "last"])
    assert found == [
        f"jit_loop {op}"
        for op in ("first", *("less", "body.1", "gemm", "body.2") * 3, "less", "last", "first", "less", "last")
    ]


def test_branches_go_either_way_and_calls_are_gone_through() -> None:
    branch = module(
        "jit_b",
        {1: [Op("c", "conditional", called=(2, 3)), Op("k", "call", called=(4,))], 2: [Op("yes")], 3: [], 4: [Op("z")]},
    )
    assert named([branch], ["yes", "z", "z"]) == ["jit_b yes", "jit_b z", "jit_b z"]


def test_after_something_unknown_the_text_begins_anew() -> None:
    found = named([A], ["add_2", "my_own_kernel", "mul_4", "dot_1", "add_2"])
    assert found == ["jit_a add.2", "", "jit_a mul.4", "jit_a dot.1", "jit_a add.2"]


def test_each_device_and_launching_thread_is_a_text_of_its_own() -> None:
    names = ["dot_1", "dot_1", "add_2", "sub_5"]
    assert named([A, B], names, device=[0, 1, 0, 1]) == ["jit_a dot.1", "jit_b dot.1", "jit_a add.2", "jit_b sub.5"]


def test_the_nodes_of_a_graph_come_in_the_order_of_their_numbers_not_of_their_times() -> None:
    names = ["mul_4", "dot_1", "add_2", "dot_1"]
    found = named([A], names, correlation=[9] * 4, graph_node_id=[7, 4, 5, 6])
    assert found == ["jit_a mul.4", "jit_a dot.1", "jit_a add.2", "jit_a dot.3"]


def test_a_node_that_ran_twice_in_one_launch_is_a_loop_which_only_times_tell_about() -> None:
    names = ["first", "less", "body_1", "body_2", "less", "body_1", "body_2", "less", "last"]
    node = [1, 2, 3, 4, 2, 3, 4, 2, 5]
    found = named([LOOP], names, correlation=[9] * 9, graph_node_id=node)
    assert found[3:6] == ["jit_loop body.2", "jit_loop less", "jit_loop body.1"]


def test_what_is_known_already_is_kept() -> None:
    strings = StringTable()
    table = traces.table("kernel", [{"name": "dot_1", "start": 0, "duration": 1, "hlo": '"hlo_op":"x"'}], strings)
    found = with_hlo({"kernel": table}, [read_module(A)], strings)["kernel"]
    assert strings.strings[int(found["hlo"][0])] == '"hlo_op":"x"'


def test_modules_that_allow_too_much_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hlo_kernels, "MOST_AHEAD", 3)
    wide = module("jit_wide", {1: [Op("seen"), *(Op(f"unseen.{number}") for number in range(5))]})
    assert named([wide, A], ["seen", "add_2", "dot_1", "mul_4"])[1:] == ["jit_a add.2", "jit_a dot.3", "jit_a mul.4"]


def test_computations_that_call_each_other_in_a_ring_end() -> None:
    ring = module("jit_r", {1: [Op("a", "call", called=(2,)), Op("f")], 2: [Op("b", "call", called=(1,))]})
    assert named([ring], ["f", "f"]) == ["jit_r f", "jit_r f"]


@pytest.mark.parametrize(("run", "unnamed"), [("jax-graphs", 15), ("jax-plain", 10)])
def test_on_an_h200_no_kernel_gets_another_instruction_than_xla_says(run: str, unnamed: int) -> None:
    strings = StringTable()
    decoded = xplane_profile.decode(source([recorded(f"{run}-xspace")], xplane_profile.FORMAT), strings)
    kernels = decoded.tables["kernel"]
    truth = [json.loads("{" + strings.strings[number] + "}") for number in kernels["hlo"].tolist()]
    blind = Table("kernel", {**kernels.columns, "hlo": np.full(len(kernels), -1, np.int32)})
    modules = [read_module(part) for part in parts(recorded(f"{run}-modules"))]
    found = with_hlo({"kernel": blind}, modules, strings)["kernel"]
    wrong, unknown = [], 0
    for number, right in zip(found["hlo"].tolist(), truth, strict=True):
        ours = json.loads("{" + strings.strings[number] + "}") if number >= 0 else {}
        graph = right["hlo_op"].startswith("command_buffer")  # XLA itself knows no more of some CUDA graphs
        unknown += "hlo_op" not in ours
        if ours and (ours["hlo_module"] != right["hlo_module"] or not (graph or ours["hlo_op"] == right["hlo_op"])):
            wrong.append((ours, right))
    assert (wrong, unknown) == ([], unnamed)
