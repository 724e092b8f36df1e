"""Modules that XLA compiled: instructions that launch something, in the order of the schedule."""

from kineto_agent.protocol.records import HLO_MODULES_FORMAT
from kineto_trace.decode.hlo_modules import decode, parts, read_module
from kineto_trace.model.hlo_module import Launch
from kineto_trace.model.trace import StringTable
from support.xla.messages import Op, module, recorded, source


def test_instructions_come_in_the_order_of_the_schedule_without_those_that_launch_nothing() -> None:
    ops = [Op("p", "parameter"), Op("fusion.2"), Op("t", "tuple"), Op("dot.1", "custom-call"), Op("copy.3", "copy")]
    found = read_module(module("jit_f", {1: ops}))
    assert (found.name, found.entry) == ("jit_f", 1)
    assert [(each.name, each.launch) for each in found.computations[1]] == [
        ("fusion.2", Launch.FUSION),
        ("dot.1", Launch.LIBRARY),
        ("copy.3", Launch.COPY),
    ]


def test_loops_branches_and_calls_name_their_computations() -> None:
    ops = [
        Op("w", "while", called=(2, 3)),
        Op("c", "conditional", called=(4, 5)),
        Op("a", "call", called=(6,)),
        Op("r", "reduce", called=(7,)),
    ]
    found = read_module(module("jit_f", {1: ops}))
    assert [(each.launch, each.called) for each in found.computations[1]] == [
        (Launch.LOOP, (2, 3)),
        (Launch.BRANCH, (4, 5)),
        (Launch.CALL, (6,)),
        (Launch.LIBRARY, ()),
    ]


def test_operation_line_and_those_that_share_a_kernel_are_known() -> None:
    found = read_module(module("jit_f", {1: [Op("f.2", alike="f.1", op_name="jit(f)/add", source="a.py", line=7)]}))
    (only,) = found.computations[1]
    assert (only.same_kernel, only.op_name, only.source, only.kernel_name) == ("f.1", "jit(f)/add", "a.py:7", "f_2")


def test_a_real_module_names_lines_of_the_program_by_their_frames() -> None:
    modules = [read_module(part) for part in parts(recorded("jax-graphs-modules"))]
    update = next(each for each in modules if each.name == "jit_update")
    found = {each.name: each for each in update.computations[update.entry]}
    assert len(modules) == 18
    assert found["gemm_fusion_dot.6"].op_name == "jit(update)/jvp()/dot_general"
    assert found["gemm_fusion_dot.6"].source == "/tmp/e.py:11"
    assert found["gemm_fusion_dot.6"].same_kernel == "gemm_fusion_dot.4"
    assert found["cudnn-conv.1"].launch is Launch.LIBRARY


def test_a_damaged_module_is_counted_and_the_others_are_read() -> None:
    good = module("jit_f", {1: [Op("fusion")]})
    found = decode(source([b"\x0a\xff", good], HLO_MODULES_FORMAT), StringTable())
    assert (len(found.hlo_modules), found.undecoded) == (1, 1)
