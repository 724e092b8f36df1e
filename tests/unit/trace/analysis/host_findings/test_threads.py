"""What is found of threads that share the GIL or the processors, and of the garbage collector.

What is found of how a program uses torch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.host_findings.threads import (
    anomaly_mode,
    compilation,
    garbage,
    gil,
    graph_breaks,
    neighbours_note,
    optimizer,
    paging,
    processors,
    second_backward,
)
from kineto_trace.analysis.host_findings.user_code import user_code
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import PROCESS, KernelCounters
from kineto_trace.model.trace import StringTable
from support.trace_files.cause_checks import wrong
from support.trace_files.sampled_stacks import (
    BACKWARD,
    FORWARD,
    LINEAR,
    MAIN,
    MODULE,
    OPTIMIZER,
    PERIOD_NS,
    SITE,
    THREAD,
    TORCH,
    Sample,
    Stack,
    sampled,
    sampled_trace,
)
from support.trace_files.traces import START_NS, table

SINGLE = (*MAIN, OPTIMIZER, TORCH + "optim/adamw.py(1): _single_tensor_adamw")
FUSED = (*MAIN, OPTIMIZER, TORCH + "optim/adamw.py(1): _fused_adamw")
COMPILES = (*MAIN, TORCH + "_dynamo/eval_frame.py(1): compile_wrapper", TORCH + "_dynamo/convert_frame.py(9): _compile")
STEP = {"name": "Optimizer.step#AdamW.step", "thread": 1}


def test_a_thread_that_holds_the_gil_is_named() -> None:
    others = [("/job/metrics.py(5): crunch",)] * 100
    context = sampled([*[FORWARD] * 70, *[((*MAIN,), "waiting")] * 30], others=others, threads={2: "metrics"})
    (finding,) = gil(context)
    assert finding.title == (
        "The training thread waits for Python's global interpreter lock (GIL), which crunch (/job/metrics.py:42) in "
        "thread metrics holds"
    )
    assert finding.saving_ns == 30 * PERIOD_NS


def test_the_loader_s_thread_that_pins_memory_cannot_be_moved_to_a_process() -> None:
    others = [("/venv/torch/utils/data/_utils/pin_memory.py(18): _pin_memory_loop",)] * 100
    context = sampled([*[FORWARD] * 70, *[((*MAIN,), "waiting")] * 30], others=others, threads={2: "pin"})
    (finding,) = gil(context)
    assert finding.advice.startswith("Give this DataLoader thread less to do")


def test_nobody_waits_for_the_gil() -> None:
    assert list(gil(sampled([FORWARD] * 100))) == []


def test_the_garbage_collector_is_named_with_the_line_at_which_it_runs_most() -> None:
    after = (*MAIN, "/job/callbacks.py(7): after_step")
    collecting = [*[(after, "running collecting")] * 25, *[(FORWARD, "running collecting")] * 5]
    context = sampled([*[FORWARD] * 60, *[after] * 10, *collecting])
    (finding,) = garbage(context)
    assert finding.title == ("Python's garbage collector runs in the steps, mostly in after_step (callbacks.py:42)")
    assert finding.saving_ns == 30 * PERIOD_NS
    assert "gc.freeze()" in finding.advice
    taken = next(found for found in user_code(context) if "after_step" in found.title)
    assert taken.saving_ns == 10 * PERIOD_NS  # what the collector took is told once


def test_a_trace_without_collections_tells_of_none() -> None:
    assert list(garbage(sampled([FORWARD] * 100))) == []


CHILDREN = ("pid", "first_ns", "last_ns", "cpu_ns", "wait_ns", "major_faults", "read_bytes")
BACKWARDS: list[Sample] = [(*MAIN, BACKWARD)] * 60
PAGING: list[Sample] = [
    *BACKWARDS,
    *[((*MAIN, BACKWARD), "idle idle_memory")] * 30,
    *[((*MAIN, BACKWARD), "idle idle_lock")] * 10,
]


def counted(major_faults: int, cpu_share: float = 0.0) -> dict[str, Any]:
    """What the kernel counted, of the training thread alone, which waited for no CPU."""
    one = np.array([1])
    found = KernelCounters(
        times=np.array([START_NS, START_NS + 100 * PERIOD_NS]),
        rows={
            "interval": one * 0, "thread": one * THREAD, "cpu_ns": one * int(cpu_share * 100 * PERIOD_NS),
            "wait_ns": one * 0, "switches": one,
        },
        events={
            "thread": one * THREAD, "voluntary_switches": one, "involuntary_switches": one, "minor_faults": one,
            "major_faults": one * major_faults,
        },
        lives=dict.fromkeys(("thread", "first_ns", "last_ns"), one[:0]),
        process=dict.fromkeys(PROCESS, one),
        children=dict.fromkeys(CHILDREN, one[:0]),
        child_names=(),
    )  # fmt: skip
    return found.to_json()


def test_memory_that_comes_from_storage_while_the_model_trains_is_found() -> None:
    (finding,) = paging(sampled(PAGING, kernel_counters=counted(4000)))
    assert finding.title == "The training thread waits for memory to be read from storage, mostly in main (train.py:42)"
    assert finding.saving_ns == 30 * PERIOD_NS
    assert finding.evidence.endswith("; 4,000 of its page faults waited for storage")
    assert "swap" in finding.advice


def test_without_the_kernels_counters_the_samples_tell() -> None:
    (finding,) = paging(sampled(PAGING))
    assert finding.saving_ns == 30 * PERIOD_NS


def test_a_wait_for_another_threads_mappings_is_not_for_storage() -> None:
    assert list(paging(sampled(PAGING, kernel_counters=counted(3)))) == []


def test_many_faults_that_samples_do_not_see_are_told_by_the_kernels_counters() -> None:
    """The thread seems to run in all samples, and the kernel says that it was blocked for 30 % of the time."""
    context = sampled([FORWARD] * 100, thread_use=[use(THREAD, 100, 0.7)], kernel_counters=counted(3000, 0.7))
    (finding,) = paging(context)
    assert finding.title == "The training thread waits for memory to be read from storage"
    assert round(finding.saving_ns / PERIOD_NS) == 30
    assert list(processors(context)) == []  # it was not ready to run


def test_a_block_that_page_faults_cannot_explain_is_none_of_theirs() -> None:
    context = sampled([FORWARD] * 100, thread_use=[use(THREAD, 100, 0.7)], kernel_counters=counted(10, 0.7))
    assert list(paging(context)) == []
    assert len(list(processors(context))) == 1


def test_memory_that_other_code_waits_for_is_told_of_that_code_alone() -> None:
    after = (*MAIN, "/job/callbacks.py(7): look_up")
    context = sampled([*[FORWARD] * 70, *[(after, "idle idle_memory")] * 30])
    assert list(paging(context)) == []
    (finding,) = user_code(context)
    assert finding.title == "look_up (callbacks.py:42) waits for memory to be read from storage"
    assert "swap" in finding.advice


def use(thread: int, running: int, cpu_share: float) -> dict[str, int]:
    values = {"thread": thread, "samples": 100, "python": 100, "waiting": 0, "has_gil": 0}
    return {**values, "running": running, "idle": 100 - running, "cpu_ns": int(cpu_share * 100 * PERIOD_NS)}


def test_a_thread_that_is_ready_but_has_half_a_processor_is_found() -> None:
    context = sampled([FORWARD] * 100, thread_use=[use(THREAD, 100, 0.5), use(3, 100, 0.5)], threads={1: "MainThread"})
    (finding,) = processors(context)
    assert finding.title == "The training thread is short of CPU: it got 0.5 of a core"
    assert round(finding.saving_ns / PERIOD_NS) == 50
    assert "torch.set_num_threads" in finding.advice


def crowd(others: float, *, ready: int = 1, **limits: Any) -> dict[str, Any]:
    """The kernel's counters of a host of 2 cores, `others` of which other processes use. ready: threads of this one."""
    length, found = 100 * PERIOD_NS, counted(0)
    threads = {"interval": [0] * ready, "thread": [*range(THREAD, THREAD + ready)], "switches": [1] * ready}
    half = {"cpu_ns": [length // 2] * ready, "wait_ns": [length // 2] * ready}
    process = {
        **found["process"],
        "cpu_ns": [ready * length // 2],
        "host_busy_ns": [ready * length // 2 + int(others * length)],
    }
    names: dict[str, Any] = {"neighbours": {"pid": [70, 71, 72], "cpu_ns": [length // 2, length // 4, length // 50]}}
    names["neighbour_names"] = ["cc", "cc", "top"]
    cores = {"host_cores": 2, "usable_cores": 2}
    return {**found, "rows": {**threads, **half}, "process": process, **names, **cores, **limits}


STARVED: dict[str, Any] = {"thread_use": [use(THREAD, 100, 0.5), use(3, 100, 0.5)], "threads": {1: "MainThread"}}


def test_other_programs_that_take_the_cores_are_named_and_no_finding() -> None:
    context = sampled([FORWARD] * 100, **STARVED, kernel_counters=crowd(1.2))
    assert list(processors(context)) == []
    assert neighbours_note(context) == (
        "the training thread waited for a CPU for 50 % of the time: other processes used 1.2 of the host's 2 cores (cc "
        "0.8 in 2 processes)"
    )


@pytest.mark.parametrize(
    ("counters", "advice"),
    [
        (crowd(0.1, ready=4), "Use fewer threads (torch.set_num_threads, OMP_NUM_THREADS): 2 are busy on 1.0 cores."),
        (crowd(1.0, ready=4), "Use fewer threads (torch.set_num_threads, OMP_NUM_THREADS): 2 are busy on 1.0 cores."),
        (crowd(1.2, usable_cores=1), "Let the process run on more cores: its CPU affinity allows 1 of the host's 2"),
        (
            {**crowd(1.2, quota_cores=1.5, quota_group="/jobs"),
             "process": {**crowd(1.2)["process"], "quota_periods": [10], "throttled_periods": [4]}},
            "Raise the CPU limit of the container or service: its quota of 1.5 cores (control group /jobs) was used up "
            "in 40 % of the periods.",
        ),
    ],
    ids=["threads", "threads, whoever else runs", "affinity", "quota"],
)  # fmt: skip
def test_what_keeps_a_thread_from_the_processor_is_told_apart(counters: dict[str, Any], advice: str) -> None:
    context = sampled([FORWARD] * 100, **STARVED, kernel_counters=counters)
    (finding,) = processors(context)
    assert finding.advice.startswith(advice)
    assert neighbours_note(context) is None


def test_a_thread_that_has_the_processor_whenever_it_is_ready_is_no_finding() -> None:
    assert list(processors(sampled([FORWARD] * 100, thread_use=[use(THREAD, 80, 0.78)]))) == []


def op(name: str, start: int, end: int, **values: int) -> dict[str, Any]:
    """An operator from one sample to another."""
    duration = (end - start) * PERIOD_NS
    return {"name": name, "start": start * PERIOD_NS, "duration": duration, "thread": 1, "torch_thread": 1, **values}


def backward(number: int, start: int, end: int) -> list[dict[str, Any]]:
    node = op("AddmmBackward0", start, end, sequence=number, forward_thread=1, scope=1)
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    return [op(engine, start, end, sequence=number, forward_thread=1, scope=1), node]


def test_an_optimizer_that_goes_over_the_parameters_one_by_one_is_found() -> None:
    marks = [{**STEP, "start": 50 * PERIOD_NS, "duration": 50 * PERIOD_NS}]
    (finding,) = optimizer(sampled([*[FORWARD] * 50, *[SINGLE] * 50], annotations=marks))
    assert finding.title == "The optimizer (AdamW.step) updates the parameters one by one"
    assert finding.saving_ns == 50 * PERIOD_NS


def test_a_fused_optimizer_is_no_finding() -> None:
    assert list(optimizer(sampled([*[FORWARD] * 50, *[FUSED] * 50]))) == []


def test_compiling_in_the_first_steps_alone_is_the_warm_up() -> None:
    (finding,) = compilation(sampled([*[COMPILES] * 10, *[FORWARD] * 90], steps=10))
    assert (finding.name, finding.where) == ("compile_warm_up", "main (/job/train.py:10)")
    assert finding.guess and finding.advice.startswith("Trace later, ")


def test_without_steps_tenths_of_the_trace_tell_a_warm_up_from_compiling_again() -> None:
    def name(samples: list[Sample]) -> str:
        made = sampled_trace(samples)
        tables = {**made.tables, "user_annotation": table("user_annotation", [], StringTable())}
        (finding,) = compilation(Context(replace(made, tables=tables)))
        assert "tenths of the trace" in finding.evidence
        return finding.name

    assert name([*[COMPILES] * 10, *[FORWARD] * 90]) == "compile_warm_up"
    assert name([*[COMPILES] * 2, *[FORWARD] * 8] * 10) == "recompilation"


def test_compiling_again_and_again_is_found() -> None:
    (finding,) = compilation(sampled([*[COMPILES] * 2, *[FORWARD] * 8] * 10, steps=10))
    assert (finding.name, finding.saving_ns) == ("recompilation", 20 * PERIOD_NS)
    assert "dynamic=True" in finding.advice


def test_running_what_was_compiled_is_no_compiling() -> None:
    runs = (
        *MAIN,
        TORCH + "_inductor/output_code.py(628): CompiledFxGraph.__call__",
        SITE + "../tmp/x/cabc.py(9): call",
    )
    graph = (*MAIN, TORCH + "fx/graph_module.py(400): GraphModule.call_wrapped")
    assert list(compilation(sampled([*[runs] * 2, *[graph] * 2, *[FORWARD] * 6] * 10, steps=10))) == []


@pytest.mark.parametrize(
    ("frames", "title", "advice"),
    [
        (
            ("jax/_src/pjit.py(1): cache_miss", "jax/_src/compiler.py(2): backend_compile_and_load"),
            "JAX",
            "jax.jit once",
        ),
        (
            ("triton/runtime/jit.py(1): JITFunction.run", "triton/compiler/compiler.py(2): compile"),
            "Triton",
            "constexpr",
        ),
        (
            ("torch/_dynamo/convert_frame.py(1): _compile", "triton/compiler/compiler.py(2): compile"),
            "torch.compile",
            "dynamic",
        ),
    ],
)
def test_each_compiler_that_is_at_work_again_and_again_is_named(frames: Stack, title: str, advice: str) -> None:
    stack = (*MAIN, *(SITE + frame for frame in frames))
    (finding,) = compilation(sampled([*[(stack, "idle")] * 2, *[FORWARD] * 8] * 10, steps=10))
    assert finding.title == f"{title} compiles again and again"
    assert advice in finding.advice
    assert finding.where == "main (/job/train.py:10)"


def test_torch_compile_called_in_the_loop_is_told_apart() -> None:
    reset = (*MAIN, TORCH + "_dynamo/__init__.py(1): reset")
    (finding,) = compilation(sampled([reset, COMPILES, *[FORWARD] * 8] * 10, steps=10))
    assert finding.name == "compiled_in_the_loop"


GATE = (*MAIN, TORCH + "_dynamo/eval_frame.py(1): OptimizedModule.__call__", MODULE, "/job/net.py(3): Gate.forward")
CALLS_PIECE = (*GATE, TORCH + "_functorch/_aot_autograd/runtime_wrappers.py(1129): runtime_wrapper")
PIECE = (
    *CALLS_PIECE,
    TORCH + "_inductor/output_code.py(721): CompiledFxGraph.__call__",
    f"/tmp/i/ab/c{51 * chr(97)}.py(9): call",
)


def in_pieces(count: int, breaks: int) -> Context:
    """A step in which compiled pieces are called for 30 of 100 samples, and run for 50."""
    pieces = [
        op(f"Torch-Compiled Region: {number}/0", 80 * number // count, 80 * (number + 1) // count)
        for number in range(count)
    ]
    samples: list[Sample] = [*[CALLS_PIECE] * 30, *[PIECE] * 50, *[(*MAIN, BACKWARD)] * 20]
    return sampled(samples, ops=pieces, settings={"dynamo.graph_breaks": breaks})


def test_compiled_code_in_several_pieces_is_found_in_the_function_that_is_split() -> None:
    (finding,) = graph_breaks(in_pieces(5, breaks=2))
    assert finding.title == (
        "torch.compile has split the model: 5 compiled pieces run in each step, mostly in Gate.forward (net.py:3)"
    )
    assert finding.saving_ns == pytest.approx(30 * PERIOD_NS * 4 / 5)
    assert "graph breaks so far: 2" in finding.evidence


@pytest.mark.parametrize(("pieces", "breaks"), [(1, 2), (5, 0)])
def test_one_piece_or_pieces_that_were_compiled_apart_are_no_graph_breaks(pieces: int, breaks: int) -> None:
    assert list(graph_breaks(in_pieces(pieces, breaks))) == []


def test_compiled_code_that_runs_is_not_compiling_nor_the_users_code() -> None:
    context = in_pieces(1, breaks=0)
    assert list(compilation(context)) == []
    assert list(user_code(context)) == []


def test_stacks_that_autograd_writes_down_are_its_anomaly_mode() -> None:
    stack = (*FORWARD, "/usr/lib/python3.11/traceback.py(9): format_stack", "/usr/lib/python3.11/linecache.py(1): x")
    context = sampled([*[FORWARD] * 80, *[stack] * 20], ops=[op("aten::linear", 80, 100)])
    (finding,) = anomaly_mode(context)
    assert (finding.title, finding.saving_ns) == ("Autograd's anomaly mode is on", 20 * PERIOD_NS)


def test_checks_for_nan_outside_the_steps_are_no_saving() -> None:
    stack = (*FORWARD, "/usr/lib/python3.11/traceback.py(9): format_stack", "/usr/lib/python3.11/linecache.py(1): x")
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    checks = [
        entry
        for start, end in ((10, 30), (110, 180))
        for entry in (op(engine, start, end, sequence=7, forward_thread=1), op("aten::isnan", start, end))
    ]
    whole = sampled_trace([*[FORWARD] * 80, *[stack] * 20], ops=[op("aten::linear", 80, 100), *checks])
    longer = replace(whole, window_end_ns=whole.window_end_ns + 100 * PERIOD_NS)
    (finding,) = anomaly_mode(Context(longer))
    assert finding.saving_ns == (20 + 20) * PERIOD_NS


def test_a_stack_that_the_program_formats_itself_is_not() -> None:
    stack = (*MAIN, "/job/a.py(3): log", "/usr/lib/python3.11/traceback.py(9): format_stack")
    context = sampled([*[FORWARD] * 80, *[stack] * 20])
    assert list(anomaly_mode(context)) == []
    assert [finding.where for finding in user_code(context)] == ["log (/job/a.py:42)"]


def test_stacks_below_a_module_are_of_anomaly_mode_though_no_operator_is_seen() -> None:
    stack = (*FORWARD, "/usr/lib/python3.11/traceback.py(9): format_stack", "/usr/lib/python3.11/linecache.py(1): x")
    context = sampled([*[FORWARD] * 60, *[(*MAIN, BACKWARD)] * 20, *[stack] * 20])
    assert [finding.saving_ns for finding in anomaly_mode(context)] == [20 * PERIOD_NS]
    assert list(user_code(context)) == []


def test_where_anomaly_mode_is_known_to_be_on_it_writes_the_stacks() -> None:
    stack = (*MAIN, "/usr/lib/python3.11/traceback.py(9): format_stack")
    context = sampled([*[FORWARD] * 80, *[stack] * 20], settings={"torch.anomaly_mode": True})
    assert [finding.saving_ns for finding in anomaly_mode(context)] == [20 * PERIOD_NS]


def test_a_graph_that_is_run_backward_for_its_gradients_alone_is_found_at_its_caller() -> None:
    grad = (*MAIN, "/job/norms.py(5): log_norms", TORCH + "autograd/__init__.py(434): grad")
    samples: list[Sample] = [*[FORWARD] * 40, *[grad] * 30, *[(*MAIN, BACKWARD)] * 30]
    ops = [op("aten::linear", 0, 40, sequence=7), *backward(7, 40, 70), *backward(7, 70, 100)]
    (finding,) = second_backward(sampled(samples, ops=ops))
    assert finding.title == "log_norms (norms.py:5) runs the graph's backward pass again"
    assert finding.saving_ns == 30 * PERIOD_NS


def test_with_a_gpu_the_second_backward_costs_what_the_gpu_is_idle() -> None:
    grad = (*MAIN, "/job/norms.py(5): log_norms", TORCH + "autograd/__init__.py(434): grad")
    samples: list[Sample] = [*[FORWARD] * 40, *[grad] * 30, *[(*MAIN, BACKWARD)] * 30]
    ops = [op("aten::linear", 0, 40, sequence=7), *backward(7, 40, 70), *backward(7, 70, 100)]
    whole, strings = sampled_trace(samples, ops=ops), StringTable()
    strings.add_all(list(whole.strings))
    kernels = [{"name": "gemm", "start": start * PERIOD_NS, "duration": 29 * PERIOD_NS} for start in (0, 30, 70)]
    tables = {**whole.tables, "kernel": table("kernel", kernels, strings)}
    context = Context(replace(whole, tables=tables, strings=tuple(strings.strings)))
    (finding,) = (each for each in context.get(findings).findings if each.name == "second_backward")
    assert wrong(context) == []
    assert finding.saving_ns == (70 - 59) * PERIOD_NS  # log_norms runs from 40 to 70, a kernel until 59


def test_a_graph_that_is_run_backward_twice_has_no_caller_without_python_stacks() -> None:
    context = sampled([], ops=[op("aten::linear", 0, 40, sequence=7), *backward(7, 40, 70), *backward(7, 70, 100)])
    assert list(second_backward(context)) == []


def test_two_graphs_that_are_each_run_backward_once_are_no_finding() -> None:
    other = (*MAIN, "/job/critic.py(5): update", BACKWARD)
    samples: list[Sample] = [*[FORWARD] * 40, *[other] * 30, *[(*MAIN, BACKWARD)] * 30]
    ops = [op("aten::linear", 0, 40, sequence=7), *backward(7, 40, 70), *backward(8, 70, 100)]
    assert list(second_backward(sampled(samples, ops=ops))) == []


def test_a_model_that_is_run_without_a_backward_is_named_by_who_runs_it() -> None:
    loss = "/job/train.py(40): loss_of"
    training = (*MAIN, loss, MODULE, LINEAR)
    validating = (*MAIN, "/job/train.py(50): validate", loss, MODULE, LINEAR)
    samples: list[Sample] = [*[training] * 40, *[validating] * 20, *[(*MAIN, BACKWARD)] * 40]
    ops = [op("aten::linear", 0, 40, sequence=7), op("aten::linear", 40, 60), *backward(7, 60, 100)]
    (finding,) = user_code(sampled(samples, ops=ops))
    assert finding.title == "validate (train.py:50) runs a model without a backward pass"
    assert finding.saving_ns == 20 * PERIOD_NS


def test_a_forward_at_the_end_whose_backward_is_not_in_the_trace_is_no_evaluation() -> None:
    samples: list[Sample] = [*[FORWARD] * 40, *[(*MAIN, BACKWARD)] * 40, *[FORWARD] * 20]
    ops = [op("aten::linear", 0, 40, sequence=7), *backward(7, 40, 80), op("aten::linear", 80, 100, sequence=8)]
    assert list(user_code(sampled(samples, ops=ops))) == []
