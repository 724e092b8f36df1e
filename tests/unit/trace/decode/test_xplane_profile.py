"""Profiles of XLA become operators, annotations and kernels."""

from typing import Any

import pytest
from kineto_agent.protocol.records import XPLANE_FORMAT
from kineto_trace.decode import xplane_profile
from kineto_trace.decode.decoded import Decoded
from kineto_trace.decode.iterations import with_program_steps
from kineto_trace.model.trace import StringTable
from support.xla.messages import PlaneMaker, begun_at, recorded, source, space

BEGIN = 1_795_163_478_000_000_000
HLO = {"hlo_op": "dot.1", "hlo_module": "jit_f", "program_id": 3, "run_id": 77}


def host(*events: Any, line: str = "python", timestamp_ns: int = 10) -> PlaneMaker:
    plane = PlaneMaker("/host:CPU")
    plane.line(line, events, timestamp_ns)
    return plane


def decoded(*profiles: bytes, **metadata: Any) -> tuple[Decoded, StringTable]:
    strings = StringTable()
    return xplane_profile.decode(source(profiles, XPLANE_FORMAT, metadata), strings), strings


def rows(found: Decoded, strings: StringTable, kind: str, *columns: str) -> list[tuple[Any, ...]]:
    table = found.tables[kind]
    texts = [strings.strings[number] for number in table["name"].tolist()]
    return list(zip(texts, *(table[column].tolist() for column in columns), strict=True))


def test_hlo_operations_have_their_module_and_unix_times() -> None:
    found, strings = decoded(space(host(("dot.1", 5, 100, HLO)), begun_at(BEGIN)))
    assert rows(found, strings, "cpu_op", "start", "duration") == [("dot.1", BEGIN + 15, 100)]
    (inputs,) = found.tables["cpu_op"]["inputs"].tolist()
    assert strings.strings[inputs] == '"hlo_op":"dot.1","hlo_module":"jit_f"'
    assert (found.records, found.undecoded, found.warnings) == (1, 0, ())


def test_steps_and_marks_of_the_program_are_annotations() -> None:
    events = [
        ("train", 0, 1000, {"_r": 1, "step_num": 7}),
        ("load batch", 1, 10, {}),
        ("PjitFunction(f)", 20, 30, {}),
        ("ThunkExecutor::Execute", 60, 30, {}),
    ]
    found, strings = decoded(space(host(*events), begun_at(BEGIN)))
    assert rows(found, strings, "user_annotation", "id") == [("train", 1), ("load batch", 2)]
    assert [strings.strings[number] for number in found.tables["user_annotation"]["inputs"].tolist()[:1]] == [
        '"step_num":7'
    ]
    assert rows(found, strings, "cpu_op", "id") == [("PjitFunction(f)", 3), ("ThunkExecutor::Execute", 4)]


def test_marks_of_thread_pools_are_left_out() -> None:
    events = [("ThreadpoolListener::Record", 1, 0, {}), ("end: dot.1", 2, 0, {"_c": 5})]
    found, _strings = decoded(space(host(*events), begun_at(BEGIN)))
    assert found.records == 0


def test_a_line_is_the_python_thread_of_its_name_if_there_is_one() -> None:
    profile = space(host(("f", 0, 1, {})), host(("g", 0, 1, {}), line="tf_XLAEigen/-55"), begun_at(BEGIN))
    found, strings = decoded(profile, threads={"python": [4321]})
    assert rows(found, strings, "user_annotation", "thread") == [("f", 4321), ("g", xplane_profile.FIRST_THREAD)]
    assert found.threads == {xplane_profile.FIRST_THREAD: "tf_XLAEigen"}


def test_with_two_threads_of_a_name_nobody_is_named() -> None:
    found, _strings = decoded(space(host(("f", 0, 1, {})), begun_at(BEGIN)), threads={"python": [4321, 4322]})
    assert found.tables["user_annotation"]["thread"].tolist() == [xplane_profile.FIRST_THREAD]
    assert found.threads == {xplane_profile.FIRST_THREAD: "python"}


def test_the_same_line_of_several_pieces_is_one_thread() -> None:
    pieces = [space(host(("f", 0, 1, {})), begun_at(BEGIN + at)) for at in (0, 10**9)]
    found, strings = decoded(*pieces)
    assert rows(found, strings, "user_annotation", "start", "thread") == [
        ("f", BEGIN + 10, xplane_profile.FIRST_THREAD),
        ("f", BEGIN + 10**9 + 10, xplane_profile.FIRST_THREAD),
    ]


def test_rows_nest_as_they_did_although_picoseconds_are_rounded() -> None:
    plane = PlaneMaker("/host:CPU")
    plane.line("python", [("outer", 0, 10, {}), ("inner", 3, 7, {})], 0)
    found, _strings = decoded(space(plane, begun_at(BEGIN)))
    assert len(set(found.tables["user_annotation"].end().tolist())) == 1


def test_only_the_wanted_types_are_kept() -> None:
    profile = space(host(("dot.1", 0, 1, HLO), ("mark", 0, 1, {})), begun_at(BEGIN))
    found, _strings = decoded(profile, activity_types=["user_annotation"])
    assert set(found.tables) == {"user_annotation"}


def test_what_follows_a_damaged_place_is_lost_and_counted() -> None:
    good = space(begun_at(BEGIN), host(("f", 0, 1, {})), host(("g", 0, 1, {})))
    found, strings = decoded(good, good[:-5], b"\xff" * 20)
    assert found.undecoded == 2
    assert found.warnings[0] == "2 XLA profiles are truncated or damaged"
    assert sorted(rows(found, strings, "user_annotation")) == [("f",), ("f",), ("g",)]


def test_a_profile_that_does_not_say_when_it_began_is_told() -> None:
    found, _strings = decoded(space(host(("f", 0, 1, {}))))
    assert found.warnings == ("1 XLA profile has no known start time, so times are relative to the start",)
    assert found.tables["user_annotation"]["start"].tolist() == [10]


def test_absurd_times_stay_within_what_a_trace_can_hold() -> None:
    found, _strings = decoded(space(host(("f", 2**60, 2**60, {}), timestamp_ns=2**62), begun_at(BEGIN)))
    table = found.tables["user_annotation"]
    assert 0 <= int(table["start"][0]) <= int(table.end()[0]) <= 2**62


@pytest.mark.parametrize("name", ["jax-graphs-xspace", "jax-plain-xspace"])
def test_a_profile_of_a_gpu_has_kernels_copies_and_their_hlo(name: str) -> None:
    found, strings = decoded(recorded(name))
    kernels = found.tables["kernel"]
    assert len(found.tables["gpu_memset"]) == 24
    assert int(found.tables["gpu_memcpy"]["bytes"][0]) == 4
    first = strings.strings[int(kernels["hlo"][0])]
    assert first == '"hlo_op":"wrapped_transpose","hlo_module":"jit_update","op_name":"w[\'v\']"'
    assert (kernels["stream"] == 14).all() and (kernels["hlo"] >= 0).all() and (kernels["grid_x"] > 0).all()
    numbered = with_program_steps(found.tables, strings)
    assert numbered is not None
    names = [strings.strings[number] for number in numbered["user_annotation"]["name"].tolist()]
    steps = [name for name in names if name.startswith("ProfilerStep#")]
    assert steps == [f"ProfilerStep#{number}" for number in range(10)]


def test_a_tpu_has_operations_steps_and_modules() -> None:
    plane = PlaneMaker("/device:TPU:1")
    plane.line("Steps", [("12", 0, 100, {})], row=1)
    plane.line("XLA Modules", [("jit_f(99)", 0, 90, {})], row=2)
    plane.line("XLA Ops", [("fusion.3", 10, 50, {"hlo_op": "fusion.3", "hlo_module": "jit_f"})], row=3)
    plane.line("Framework Ops", [("jit(f)/dot", 10, 50, {})], row=4)
    found, strings = decoded(space(plane, begun_at(BEGIN)))
    assert rows(found, strings, "kernel", "device", "stream", "start") == [("fusion.3", 1, 2, BEGIN + 10)]
    assert rows(found, strings, "gpu_user_annotation", "stream") == [("step_num 12", 0), ("jit_f(99)", 1)]
    numbered = with_program_steps(found.tables, strings)
    assert numbered is not None
    names = [strings.strings[number] for number in numbered["gpu_user_annotation"]["name"].tolist()]
    assert names == ["ProfilerStep#12", "jit_f(99)"]
