"""What GPUs do and need not, in traces of training threads whose samples come every 10 ms.

Functions that train nothing, in programs that use a GPU: what the steps run again without them save."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.cause_views import CAUSES
from kineto_trace.analysis.finding import COLLECTIVES_OF_THE_HOST, Finding
from kineto_trace.analysis.findings import gpu_work_findings as aside
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.analysis.findings.gpu_work_findings import (
    LEFT,
    MANY,
    OPTIMIZER_PASSES,
    double_precision,
    is_part_of_one,
    launch_origins,
    models_without_backward,
    non_training,
    non_training_findings,
    non_training_time,
    optimizer_kernels,
    small_kernels,
    small_kernels_of_functions,
)
from kineto_trace.analysis.findings.idle_findings import host_bound
from kineto_trace.analysis.step_replay import function_slots, step_replay
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import (
    BACKWARD,
    FORWARD,
    MAIN,
    MODULE,
    OPTIMIZER,
    PERIOD_NS,
    SITE,
    Sample,
    stack_rows,
)
from support.trace_files.simulated.host_and_gpu import LAUNCH, US, Program
from support.trace_files.traces import START_NS, target, trace

Row = dict[str, Any]
LINE = "/job/train.py({}): {}"
VALIDATE = (*MAIN, LINE.format(30, "validate"))
GEMM, POINTWISE = "sm90_xmma_gemm_bf16", "vectorized_elementwise_kernel"
FUSED_ADAM = (
    "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>, double, double>"
)
PENALTY = (*MAIN, "/job/train.py(50): penalty")
STEPS = 5
LOOP = (*MAIN, "/job/loss.py(7): boxes")
STEP = (*MAIN, OPTIMIZER)
PUBLISHED_STEPS = 20
PUBLISH = "/job/board.py(3): publish"
STEP_NS = 3 * PERIOD_NS


def span(name: str, start: float, end: float, **more: Any) -> Row:
    """An event from one sample to another."""
    return {"name": name, "start": int(start * PERIOD_NS), "duration": int((end - start) * PERIOD_NS), **more}


def operator(name: str, start: float, thread: int = 1, **more: Any) -> Row:
    return span(name, start, start + 0.5, thread=thread, torch_thread=thread, **{"sequence": -1, "scope": 0, **more})


def trained(extra: str, kernel: str, stack: Sequence[str] = VALIDATE, loop: Sequence[str] = MAIN) -> Context:
    """Five steps of four samples in `loop`: forward, `extra` in `stack`, backward in another thread, optimizer.

    A kernel of one period follows each operator, from the next sample on.
    """
    samples: list[Sample] = []
    ops, launches, done = [], [], []
    for step in range(5):
        at = 4 * step
        samples += [(*loop, MODULE), tuple(stack), (*loop, BACKWARD), tuple(loop)]
        ops += [
            operator("aten::linear", at, sequence=step),
            operator(extra, at + 1),
            operator("AddmmBackward0", at + 2, 2, sequence=step, forward_thread=1, scope=1),
        ]
        for number, (name, thread) in enumerate([(GEMM, 1), (kernel, 1), (GEMM, 2)]):
            correlation = 1 + 3 * step + number
            moment = at + number + 0.1
            launches.append(span("cudaLaunchKernel", moment, moment + 0.1, thread=thread, correlation=correlation))
            done.append(span(name, at + number + 1, at + number + 2, correlation=correlation))
    return context_of(samples, ops, launches, done)


def context_of(samples: Sequence[Sample], ops: Sequence[Row], launches: Sequence[Row], done: Sequence[Row]) -> Context:
    """A trace that ends a period after its samples."""
    rows = {
        "python_function": stack_rows(samples),
        "cpu_op": [{"finished": 1, "inputs": -1, "id": 100 + n, **row} for n, row in enumerate(ops)],
        "cuda_runtime": launches,
        "kernel": done,
    }
    window = {"window_start_ns": START_NS - 1, "window_end_ns": START_NS + (len(samples) + 1) * PERIOD_NS}
    return Context(trace(rows, sample_period_ns=PERIOD_NS, target=target(), **window))


def test_a_function_that_runs_a_model_without_a_backward_is_found() -> None:
    ((finding, _function),) = models_without_backward(trained("aten::linear", GEMM))
    assert (finding.title, finding.where) == (
        "validate (train.py:30) runs a model without a backward pass",
        "validate (/job/train.py:30)",
    )
    assert finding.saving_ns == 5 * PERIOD_NS


def test_a_sample_in_the_backward_trains_also_where_an_operator_without_a_backward_comes_next() -> None:
    """Products of the loop itself, which begin as soon as backward() returns, made the whole loop an evaluation."""
    samples: list[Sample] = []
    ops, launches, done = [], [], []
    for step in range(5):
        at = 8 * step
        samples += [(*MAIN, MODULE), *[(*MAIN, BACKWARD)] * 6, MAIN]
        ops += [
            operator("aten::linear", at, sequence=step),
            operator("AddmmBackward0", at + 1, 2, sequence=step, forward_thread=1, scope=1),
            *(operator("aten::mm", at + place + 0.01) for place in range(1, 7)),
        ]
        for place in range(1, 8):
            correlation = 8 * step + place
            moment = at + place - 0.9
            launches.append(span("cudaLaunchKernel", moment, moment + 0.1, thread=1, correlation=correlation))
            done.append(span(GEMM, at + place, at + place + 1, correlation=correlation))
    assert models_without_backward(context_of(samples, ops, launches, done)) == ()


def test_an_evaluation_inside_the_loop_of_a_framework_is_told_by_its_function() -> None:
    trainer = SITE + "transformers/trainer.py"
    loop = (*MAIN, trainer + "(5): Trainer.train")
    stack = (*loop, trainer + "(70): Trainer._maybe_log_save_evaluate", trainer + "(90): Trainer.evaluate", MODULE)
    ((finding, _function),) = models_without_backward(trained("aten::linear", GEMM, stack, loop))
    assert (finding.title, finding.where) == (
        "Trainer.evaluate of transformers, called in main (train.py:10), runs a model without a backward pass",
        "main (/job/train.py:10)",
    )
    assert finding.advice.endswith("TrainingArguments: eval_strategy, eval_steps.")
    assert finding.saving_ns == 5 * PERIOD_NS


def test_elementwise_work_without_a_backward_is_no_model() -> None:
    assert models_without_backward(trained("aten::mul", POINTWISE)) == ()


def test_a_program_that_never_trains_is_no_finding() -> None:
    context = trained("aten::linear", GEMM)
    context.trace.table("cpu_op")["forward_thread"][:] = 0
    assert models_without_backward(context) == ()


def test_a_forward_whose_backward_may_come_after_the_trace_does_not_count() -> None:
    context = trained("aten::linear", GEMM)
    backward = context.trace.table("cpu_op")["forward_thread"]
    backward[3 * 3 :] = 0  # the last two steps have none
    ((finding, _function),) = models_without_backward(context)
    assert finding.saving_ns == 3 * PERIOD_NS


@pytest.mark.parametrize(
    ("kernel", "double"),
    [
        ("vectorized_elementwise_kernel<2, at::native::CUDAFunctor_add<double>, std::array<char*, 3ul> >", True),
        ("cunn_SoftMaxForwardReg<double, double, double, LogSoftMaxForwardEpilogue, long, 8>(double*)", True),
        ("cutlass_80_tensorop_d884gemm_64x64", True),
        ("vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >", False),
        (FUSED_ADAM, False),
    ],
)
def test_kernels_in_double_precision_are_found(kernel: str, double: bool) -> None:
    kernels = [span(name, start, start + 1, correlation=1) for start, name in enumerate((kernel, "sgemm"))]
    found = list(double_precision(Context(trace({"kernel": kernels}, length_ns=2 * PERIOD_NS))))
    assert [finding.saving_ns for finding in found] == [PERIOD_NS // 2] * double


@pytest.mark.parametrize(("capability", "saving"), [((9, 0), 0.5), ((8, 9), 31 / 32), ((6, 1), 31 / 32)])
def test_products_in_double_precision_save_what_the_gpu_computes_them_more_slowly(
    capability: tuple[int, int], saving: float
) -> None:
    kernels = [span("volta_dgemm_64x64_nn", 0, 1, correlation=1)]
    gpu = {"id": 0, "computeMajor": capability[0], "computeMinor": capability[1]}
    (found,) = double_precision(Context(trace({"kernel": kernels}, length_ns=PERIOD_NS, devices=[gpu])))
    assert found.saving_ns == int(PERIOD_NS * saving)
    assert ("32 times as long" in found.evidence) == (capability != (9, 0))


def test_elementwise_kernels_in_double_precision_are_to_change_their_type_before_they_are_fused() -> None:
    names = [f"vectorized_elementwise_kernel<2, at::native::CUDAFunctor_add<{of}> >" for of in ("float", "double")]
    kernels = [span(name, 3 * at, 3 * at + 1 + at, correlation=at + 1) for at, name in enumerate(names)]
    told = {each.name: each for each in findings(Context(trace({"kernel": kernels}, length_ns=5 * PERIOD_NS))).findings}
    assert (told["double_precision"].saving_ns, told["elementwise"].saving_ns) == (PERIOD_NS, PERIOD_NS // 2)
    assert told["elementwise"].evidence.endswith("; others taking 20 ms compute in float64 (a separate finding)")


def copied(kind: str) -> Context:
    """A kernel, and a copy after it that nothing hides."""
    kernels = [span("k", 0, 1, correlation=1), span("k", 3, 4, correlation=3)]
    copies = [span(f"Memcpy HtoD ({kind} -> Device)", 1, 3, correlation=2)]
    calls = [span("cudaLaunchKernel", 0.1, 0.2, thread=1, correlation=number) for number in (1, 2, 3)]
    rows = {"kernel": kernels, "gpu_memcpy": copies, "cuda_runtime": calls}
    return Context(trace(rows, length_ns=4 * PERIOD_NS))


def test_pinned_copies_that_nothing_hides_are_found_with_their_time() -> None:
    found = {finding.name: finding for finding in findings(copied("Pinned")).findings}
    assert found["pinned_copies"].saving_ns == 2 * PERIOD_NS
    assert "Keep data on the GPU if it does not change from step to step" in found["pinned_copies"].advice
    assert found["pinned_copies"].evidence == "1 copy taking 20 ms, 20 ms of that while no kernel runs"


def test_copies_of_pageable_memory_are_no_pinned_ones() -> None:
    assert "pinned_copies" not in {finding.name for finding in findings(copied("Pageable")).findings}


def test_kernels_that_change_the_layout_of_images_ask_for_channels_last() -> None:
    names = ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>", "sm90_xmma_fprop_implicit_gemm_bf16")
    kernels = [span(name, at, at + 1, correlation=at + 1) for at, name in enumerate(names)]
    found = {
        each.name: each for each in findings(Context(trace({"kernel": kernels}, length_ns=2 * PERIOD_NS))).findings
    }
    assert found["layout_changes"].saving_ns == PERIOD_NS
    assert "torch.channels_last" in found["layout_changes"].advice


def test_a_network_in_the_right_layout_is_told_nothing() -> None:
    kernels = [span("sm90_xmma_fprop_implicit_gemm_bf16_nhwc", 0, 1)]
    found = findings(Context(trace({"kernel": kernels}, length_ns=2 * PERIOD_NS))).findings
    assert "layout_changes" not in {finding.name for finding in found}


@pytest.mark.parametrize(("benchmark", "told"), [(False, True), (True, False), (None, False)])
def test_convolutions_that_cudnn_could_measure_are_told_last(benchmark: bool | None, told: bool) -> None:
    rows = {
        "kernel": [span("sm90_xmma_fprop_implicit_gemm_bf16_nhwc", 1, 2, correlation=1)],
        "cuda_runtime": [span("cudaLaunchKernel", 0.2, 0.3, thread=1, correlation=1)],
        "cpu_op": [operator("aten::cudnn_convolution", 0, id=1, finished=1)],
    }
    settings = {} if benchmark is None else {"torch.cudnn_benchmark": benchmark}
    made = Context(trace(rows, length_ns=2 * PERIOD_NS, target=target(settings=settings)))
    found = [finding for finding in findings(made).findings if finding.name == "unmeasured_convolutions"]
    assert [(finding.guess, finding.saving_ns) for finding in found] == [(True, PERIOD_NS // 10)] * told


def launched(*operators: Row, annotations: tuple[Row, ...] = ()) -> Context:
    """A short kernel at the end of each operator, which is launched by it; stacks of four samples around them."""
    kernels, calls, ops = [], [], []
    for number, row in enumerate(operators, 1):
        end = row["start"] + row["duration"]
        calls.append({"name": "cudaLaunchKernel", "start": end - 2_000, "duration": 1_000, "correlation": number})
        calls[-1]["thread"] = row["thread"]
        kernels.append({"name": "k", "start": end, "duration": 1_000, "correlation": number})
        ops.append({"finished": 1, "inputs": -1, "id": number, "scope": 0, "sequence": -1, **row})
    rows = {
        "python_function": stack_rows([MAIN, PENALTY, (*MAIN, OPTIMIZER), MAIN]),
        "cpu_op": ops,
        "cuda_runtime": calls,
        "kernel": kernels,
        "user_annotation": [{"thread": 1, "id": 9, "finished": 1, **row} for row in annotations],
    }
    return Context(trace(rows, length_ns=4 * PERIOD_NS, sample_period_ns=PERIOD_NS, target=target()))


def forward(start: float, end: float) -> Row:
    return span("aten::abs", start, end, thread=1, torch_thread=1, sequence=3)


def backward(start: float, end: float) -> Row:
    return span("AbsBackward0", start, end, thread=2, torch_thread=2, sequence=3, forward_thread=1, scope=1)


def names(context: Context) -> list[str]:
    return [context.trace.strings[number] if number >= 0 else "" for number in context.get(launch_origins).function]


def test_work_of_the_backward_comes_from_the_function_of_its_forward() -> None:
    context = launched(forward(1.1, 1.2), backward(3.1, 3.3))
    assert names(context) == [PENALTY[-1], PENALTY[-1]]


def test_a_backward_whose_forward_is_not_in_the_trace_comes_from_nowhere() -> None:
    assert names(launched(backward(3.1, 3.3))) == [""]


def test_what_the_optimizer_launches_is_its_own() -> None:
    step = span("Optimizer.step#AdamW.step", 2, 3)
    context = launched(forward(1.1, 1.2), span("aten::mul", 2.1, 2.2, thread=1), annotations=(step,))
    assert context.get(launch_origins).optimizer.tolist() == [False, True]


@pytest.mark.parametrize(
    ("operators", "shown"),
    [
        ((forward(1.0, 1.9), backward(3.0, 3.9)), ", most of it for penalty (train.py:50)"),
        ((span("aten::mul", 1.9, 2.9, thread=1),), ", most of it for penalty (train.py:50)"),
        ((span("aten::mul", 2.1, 2.9, thread=1),), ", most of it for the optimizer (AdamW.step)"),
        ((backward(3.0, 3.9),), ""),
    ],
)
def test_a_gpu_that_waits_for_launches_is_told_for_what(operators: tuple[Row, ...], shown: str) -> None:
    step = span("Optimizer.step#AdamW.step", 2, 3)
    (finding,) = host_bound(launched(*operators, annotations=(step,)))
    assert finding.title == "The GPU waits for the host to launch work" + shown
    assert (not finding.where) is (not shown)


def looping(count: int, kernel: int, *, stack: Sample = LOOP, name: str = "k", devices: int = 1) -> Context:
    """Steps of a sample in forward, which launches a large kernel, and one in `stack`, which launches many."""
    program, samples, updates = Program(), list[Sample](), list[dict[str, Any]]()
    for _ in range(STEPS):
        begin = program.now
        samples += [FORWARD, stack]
        program.operator("aten::linear", PERIOD_NS - 10 * US)
        program.host(PERIOD_NS // 10)
        program.launch(PERIOD_NS // 2)
        program.now = begin + PERIOD_NS
        for _ in range(count):
            program.operator("aten::add", 8 * US)
            program.host(US)
            program.launch(kernel)
            program.rows["kernel"][-1]["name"] = name
            program.host(10 * US)
        program.rows["kernel"][-1]["device"] = devices - 1
        if stack is STEP:
            updates.append({"name": "Optimizer.step#AdamW.step", "start": begin + PERIOD_NS, "duration": PERIOD_NS})
        program.now = begin + 2 * PERIOD_NS
        program.step(begin)
    rows = {kind: found for kind, found in program.rows.items() if found}
    common = {"thread": 1, "finished": 1, "inputs": -1, "scope": 7}
    rows["user_annotation"] += [{**common, **row, "id": 20_000 + number} for number, row in enumerate(updates)]
    rows["python_function"] = stack_rows(samples)
    return Context(trace(rows, length_ns=program.now + 1, sample_period_ns=PERIOD_NS, target=target()))


def test_a_function_that_launches_many_small_kernels_is_found() -> None:
    context = looping(200, 4 * US)
    found = context.get(small_kernels)
    assert found is not None
    assert context.trace.strings[found.function] == LOOP[-1]
    assert int(np.count_nonzero(found.work)) == 200 * STEPS
    (finding,) = small_kernels_of_functions(context)
    assert finding.title == "boxes (loss.py:7) launches 200 small kernels per step"
    assert finding.where == "boxes (/job/loss.py:7)"
    assert finding.replayed
    # all of them, their launches and the host's time before them
    assert finding.saving_ns == pytest.approx((1 - LEFT) * STEPS * 200 * (11 * US + LAUNCH), rel=0.05)


@pytest.mark.parametrize(("count", "kernel"), [(MANY - 1, 4 * US), (200, 9 * US)], ids=["too few", "too large"])
def test_few_or_large_kernels_are_no_finding(count: int, kernel: int) -> None:
    context = looping(count, kernel)
    assert context.get(small_kernels) is None
    assert list(small_kernels_of_functions(context)) == []


def test_small_kernels_that_are_most_of_the_work_are_the_model() -> None:
    context = looping(200, 4 * US)
    took = context.trace.table("kernel")["duration"]
    took[took > PERIOD_NS // 4] = 100 * US
    assert context.get(small_kernels) is None


def test_the_hosts_time_before_the_first_of_them_is_not_theirs() -> None:
    first = looping(200, 4 * US)  # 9 ms after the launch before it
    (finding,) = small_kernels_of_functions(first)
    assert finding.saving_ns < STEPS * (200 * (11 * US + LAUNCH) + PERIOD_NS // 10)


def test_what_many_small_kernels_cost_is_told_only_where_the_steps_run_again() -> None:
    context = looping(200, 4 * US, devices=2)
    assert context.get(step_replay) is None
    assert list(small_kernels_of_functions(context)) == []


def test_a_trace_without_steps_has_no_number_of_kernels_for_each() -> None:
    context = looping(200, 4 * US)
    tables = {kind: table for kind, table in context.trace.tables.items() if kind != "user_annotation"}
    assert Context(replace(context.trace, tables=tables)).get(small_kernels) is None


def test_an_optimizer_that_updates_parameters_one_by_one_is_found() -> None:
    context = looping(200, 4 * US, stack=STEP)
    (finding,) = optimizer_kernels(context)
    assert finding.name == "unfused_optimizer"
    assert finding.replayed
    assert finding.evidence.startswith("200 kernels per step")
    assert 0 < finding.saving_ns <= (1 - OPTIMIZER_PASSES) * STEPS * 2 * PERIOD_NS
    assert context.get(small_kernels) is None  # they are the optimizer's alone


def test_a_fused_optimizer_is_no_finding() -> None:
    assert list(optimizer_kernels(looping(200, 4 * US, stack=STEP, name="multi_tensor_apply_kernel"))) == []


def test_an_optimizer_with_few_kernels_is_no_finding() -> None:
    assert list(optimizer_kernels(looping(MANY - 1, 4 * US, stack=STEP))) == []


def training(
    kernel: int,
    *,
    extra: Sample = (*MAIN, PUBLISH),
    devices: int = 1,
    waits: bool = False,
    annotations: Sequence[dict[str, Any]] = (),
) -> Context:
    """Steps of a sample each in forward, `extra` and backward; forward and backward launch a kernel each.

    annotations: more of them, beside those of the steps.
    """
    program, samples = Program(), list[Sample]()
    for step in range(PUBLISHED_STEPS):
        begin = program.now
        for stack in (FORWARD, extra, (*MAIN, BACKWARD)):
            samples.append(stack)
            until = program.now + PERIOD_NS
            if stack == extra and waits:
                program.wait()
            if stack != extra:
                program.operator("aten::linear" if stack == FORWARD else "AddmmBackward0", PERIOD_NS * 9 // 10)
                program.host(PERIOD_NS // 10)
                program.launch(kernel)
            program.now = until
        program.step(begin)
        program.rows["kernel"][-1]["device"] = step % devices
    for row in annotations:
        program.rows["user_annotation"].append({"finished": 1, "inputs": -1, "scope": 7, **row})
    rows = {kind: found for kind, found in program.rows.items() if found}
    rows["python_function"] = stack_rows(samples)
    # the GPU may work on after the steps
    length = max(program.now, program.idle_from) + 1
    return Context(trace(rows, length_ns=length, sample_period_ns=PERIOD_NS, target=target()))


def test_a_function_that_the_gpu_waits_for_costs_its_time() -> None:
    context = training(kernel=PERIOD_NS // 10)
    (each,) = context.get(non_training)
    assert each.finding.where == "publish (/job/board.py:42)"
    assert (each.finding.replayed, each.finding.causes) == (True, CAUSES)
    assert each.finding.saving_ns == pytest.approx(PUBLISHED_STEPS * PERIOD_NS, rel=0.06)
    assert each.finding.evidence.startswith("in a replay without it, the steps take ")
    assert {context.trace.strings[name] for name in each.names} == {PUBLISH}


def test_a_function_that_waits_for_the_gpu_is_told_to_read_less_of_it() -> None:
    (silent,), (waiting,) = (training(PERIOD_NS // 10, waits=waits).get(non_training) for waits in (False, True))
    assert aside.READS not in silent.finding.advice
    assert waiting.finding.advice.endswith(f"This code also waits for results from the GPU. {aside.READS}")


@pytest.mark.parametrize("library", ["gloo", "nccl"])
def test_collectives_that_run_on_the_host_are_told_to_use_the_gpu(library: str) -> None:
    reducing = (*MAIN, "/job/stats.py(7): reduce", SITE + "torch/distributed/distributed_c10d.py(2900): all_reduce")
    threads = [
        {"name": f"{library}:all_reduce", "start": (3 * step + 1) * PERIOD_NS, "duration": PERIOD_NS // 2, "thread": 2}
        for step in range(PUBLISHED_STEPS)
    ]
    (each,) = training(PERIOD_NS // 10, extra=reducing, annotations=threads).get(non_training)
    on_the_host = library == "gloo"
    assert each.finding.title == "reduce (stats.py:42) waits in collectives" + on_the_host * " on the host"
    assert each.finding.advice.startswith(COLLECTIVES_OF_THE_HOST) is on_the_host


def test_a_function_while_which_the_gpu_always_works_is_none() -> None:
    assert training(kernel=STEP_NS).get(non_training) == ()


def test_its_time_is_that_of_its_slots_in_every_step() -> None:
    found = training(kernel=PERIOD_NS // 10).get(non_training_time)
    assert len(found.start) == PUBLISHED_STEPS
    assert found.length() == pytest.approx(PUBLISHED_STEPS * PERIOD_NS, rel=0.2)


def test_a_program_that_only_trains_has_none() -> None:
    context = training(kernel=PERIOD_NS // 10, extra=FORWARD)
    assert context.get(non_training) == ()
    assert context.get(non_training_time).length() == 0
    assert list(non_training_findings(context)) == []


def test_where_the_steps_cannot_be_run_again_there_are_none() -> None:
    context = training(kernel=PERIOD_NS // 10, devices=2)
    assert context.get(step_replay) is None
    assert context.get(non_training) == ()


def test_idle_time_in_such_a_function_is_no_finding_of_its_own() -> None:
    context = training(kernel=PERIOD_NS // 10)
    (each,) = context.get(non_training)
    names = context.trace.table("python_function")["name"]
    frame = int(np.flatnonzero(names == next(iter(each.names)))[0])
    idle = replace(each.finding, name="host_python", frame=frame, saving_ns=each.finding.saving_ns)
    assert is_part_of_one(context, idle)
    assert not is_part_of_one(context, replace(idle, saving_ns=idle.saving_ns + 1))
    assert not is_part_of_one(context, replace(idle, frame=-1))
    main = int(np.flatnonzero(names != names[frame])[0])
    assert not is_part_of_one(context, replace(idle, frame=main))


def found_model(monkeypatch: pytest.MonkeyPatch, context: Context) -> Finding:
    """Makes a model without a backward of `publish`."""
    finding = Finding(name="evaluation", title="E", saving_ns=7, advice="", evidence="", where="publish")
    model = (finding, context.trace.strings.index(PUBLISH))
    monkeypatch.setattr(aside, "models_without_backward", lambda context: (model,))
    return finding


def test_a_model_without_backward_that_has_no_slots_is_told_by_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    context = training(kernel=PERIOD_NS // 10)
    finding = found_model(monkeypatch, context)
    slots = context.get(function_slots)
    nothing = replace(slots, sampled=slots.sampled[:0], node=slots.node[:0])
    monkeypatch.setattr(aside, "function_slots", lambda context: nothing)
    assert list(non_training_findings(context)) == [finding]


def test_a_model_without_backward_is_told_once_where_it_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    context = training(kernel=PERIOD_NS // 10)
    found_model(monkeypatch, context)
    (finding,) = non_training_findings(context)
    assert (finding.name, finding.replayed) == ("evaluation", True)
    assert finding.evidence.endswith("% of the GPU's work, in operators without a backward pass")
    assert finding.saving_ns == pytest.approx(PUBLISHED_STEPS * PERIOD_NS, rel=0.06)
