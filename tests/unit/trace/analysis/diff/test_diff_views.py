from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.diff.diff_views import (
    compare,
    compare_jobs,
    compare_ranks,
    diff_call_paths,
    diff_kernel_names,
    diff_kernels,
    diff_modules,
    diff_operators,
    diff_ops,
    diff_python_functions,
    diff_step_times,
    diff_steps,
    function_name,
)
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.view_api.result import Result
from support.trace_files.ranks import context as of_events
from support.trace_files.ranks import event, launched
from support.trace_files.ranks import step as marked
from support.trace_files.step_traces import context, noisy, stepped
from support.trace_files.traces import START_NS, trace


def told(result: Result) -> dict[str, str]:
    return dict(zip(result.values("name"), result.values("verdict"), strict=True))


def test_a_shorter_trace_of_the_same_program_has_no_changes() -> None:
    long, short = (
        context({"mm": noisy(3000, steps, steps)}, {"gemm": noisy(900, steps, 2 * steps)}) for steps in (40, 6)
    )
    for found in (diff_ops(long, short), diff_kernels(long, short), diff_steps(long, short)):
        assert set(told(found).values()) == {"within noise"}
    row = next(row for row in diff_ops(long, short).rows() if row["name"] == "mm")
    assert (row["calls_baseline"], row["calls_other"], row["per"]) == (1, 1, "step")
    assert abs(row["delta_pct"]) < 3


def test_a_slower_operator_a_new_one_and_one_that_is_gone_are_told_from_noise() -> None:
    same = {"copy": noisy(500, 8, 1, 0.1), "add": noisy(100, 8, 2)}
    first = context({**same, "mm": noisy(3000, 8, 3), "old": noisy(40, 8, 4)})
    second = context({**same, "copy": noisy(500, 8, 5, 0.1), "mm": noisy(3600, 8, 6), "fused": noisy(60, 8, 7)})
    found = diff_ops(first, second)
    assert list(told(found).items()) == [
        ("mm", "slower"),
        ("fused", "new"),
        ("old", "gone"),
        ("copy", "within noise"),
        ("add", "within noise"),
    ]
    row = found.rows()[0]
    assert 0 < row["delta_low_us"] < 600 < row["delta_high_us"]
    assert row["delta_pct"] == pytest.approx(20, abs=3)
    assert row["step_delta_pct"] == pytest.approx(13, abs=2)


def test_the_parts_of_a_step_add_up_to_it_and_its_difference() -> None:
    found = diff_steps(
        context({"mm": noisy(3000, 6, 1)}, {"gemm": noisy(200, 6, 2)}),
        context({"mm": noisy(3000, 6, 3)}, {"gemm": noisy(400, 6, 4)}),
    ).rows()
    step, *parts = found
    assert (step["name"], step["time"]) == ("step", "step")
    assert sum(row["other_us"] for row in parts) == pytest.approx(step["other_us"], rel=1e-9)
    assert next(row for row in parts if row["name"] == "kernel")["verdict"] == "slower"


def test_one_step_is_compared_but_not_judged() -> None:
    found = diff_ops(context({"mm": [1000.0]}), context({"mm": [2000.0, 2000.0]}))
    (row,) = found.rows()
    assert (row["verdict"], row["delta_us"], row["delta_low_us"], row["p_value"]) == ("unknown", 1000, None, None)
    assert "a single step does not show how much steps vary" in found.notes[0]


def test_without_steps_figures_are_per_second_and_not_judged() -> None:
    first, second = (context({"mm": [4000.0] * steps}, annotated=False, tail_ns=995_000_000) for steps in (1, 2))
    found = diff_ops(first, second)
    (row,) = found.rows()
    assert (row["per"], row["verdict"], row["calls_baseline"]) == ("second", "unknown", pytest.approx(1, rel=0.01))
    assert row["baseline_us"] == pytest.approx(4000, rel=0.01)
    assert "have no complete training steps" in found.notes[0]
    assert "step" not in told(diff_steps(first, second))
    assert "the other trace has no complete" in diff_ops(context({"mm": [1.0, 1]}), second).notes[0]


def test_what_one_trace_did_not_record_is_unknown_not_gone() -> None:
    with_gpu = context({"mm": noisy(100, 5, 1)}, {"gemm": noisy(50, 5, 2)})
    found = diff_kernels(with_gpu, context({"mm": noisy(100, 5, 3)}))
    assert told(found) == {"gemm": "unknown"}
    assert "the other trace has no gpu times here: they were not recorded, or there were none" in found.notes


def test_a_step_that_was_cut_off_does_not_count() -> None:
    cut = trace(
        {
            "user_annotation": [
                {"name": f"ProfilerStep#{n}", "start": n * 1000, "duration": length, "thread": 1}
                | {"finished": finished, "id": n}
                for n, length, finished in ((1, 1000, 1), (2, 1000, 1), (3, 100, 0))
            ],
            "cpu_op": [
                {"name": "mm", "start": n * 1000 + 10, "duration": 50, "thread": 1, "finished": 1} for n in (1, 2, 3)
            ],
        }
    )
    found = diff_steps(Context(cut), Context(cut))
    assert found.rows()[0]["baseline_us"] == 1.0
    assert "complete steps: 2 (1 incomplete left out) in the baseline" in found.notes[0]


def test_a_step_that_a_source_did_not_cover_does_not_count() -> None:
    part = SourceCoverage(source="torch_ops", kinds=("cpu_op",), missing=((START_NS, START_NS + 1_000_000),))
    covered = stepped({"mm": noisy(5000, 5, 1)})
    found = diff_ops(Context(replace(covered, coverage=(part,))), Context(covered))
    assert "complete steps: 4 (1 incomplete left out) in the baseline, 5 in the other trace" in found.notes[0]


def test_gpu_work_of_a_host_that_runs_ahead_counts_where_it_ran() -> None:
    rows = {
        "user_annotation": [
            {"name": f"ProfilerStep#{n}", "start": n * 1000, "duration": 1000, "thread": 1, "finished": 1, "id": n}
            for n in (10, 11)
        ],
        "cuda_runtime": [{"name": "launch", "start": n, "duration": 1, "thread": 1, "correlation": n} for n in (1, 2)],
        "kernel": [{"name": "gemm", "start": 9100 + 1000 * n, "duration": 300, "correlation": n} for n in (1, 2)],
    }
    found = compare(diff_kernel_names, Context(trace(rows)), Context(trace(rows)))
    assert found.rows()[0]["calls_baseline"] == 1
    assert any("the host ran so far ahead" in note for note in found.notes)


def nested(scale: float, seed: int) -> Context:
    """Steps with a module that calls an inner one, and an operator in an operator there."""
    calls, ops, marks = [], [], []
    for step, factor in enumerate(noisy(1.0, 6, seed)):
        at, inner = 10_000 * step, round(scale * 1000 * factor)
        marks.append({"name": f"ProfilerStep#{step}", "start": at, "duration": 5000 + inner})
        for depth, name, own in ((1, "Net_0", 3000), (2, "Lin_0", 1000)):
            call = {"name": f"nn.Module: {name}", "start": at + 100 * depth, "duration": own + inner, "thread": 1}
            calls.append({**call, "module": 0})
        ops.append({"name": "linear", "start": at + 300, "duration": 500 + inner})
        ops.append({"name": "addmm", "start": at + 400, "duration": inner})
    for place, row in enumerate((*marks, *ops)):
        row |= {"id": place + 1, "thread": 1, "finished": 1, "inputs": -1, "sequence": -1}
    return Context(trace({"python_function": calls, "cpu_op": ops, "user_annotation": marks}))


def test_modules_and_call_paths_name_where_the_time_is() -> None:
    first, second = nested(1.0, 1), nested(2.0, 2)
    assert told(compare(diff_modules, first, second)) == {"Net_0/Lin_0": "slower", "Net_0": "within noise"}
    assert told(compare(diff_modules, first, second, total=True)) == {"Net_0/Lin_0": "slower", "Net_0": "slower"}
    paths = compare(diff_call_paths, first, second)
    assert (paths.rows()[0]["name"], paths.rows()[0]["verdict"]) == ("ProfilerStep > linear > addmm", "slower")
    assert list(told(paths).values()).count("slower") == 1
    assert told(compare(diff_operators, first, second)) == {"addmm": "slower", "linear": "within noise"}
    assert set(told(compare(diff_operators, first, second, total=True)).values()) == {"slower"}


def test_jobs_are_means_over_ranks_and_ranks_are_matched_by_number() -> None:
    def job(scale: float, seed: int, ranks: tuple[int, ...]) -> dict[int, Context]:
        return {rank: context({"mm": noisy(scale * 1000, 6, seed + rank)}, rank=rank) for rank in ranks}

    before, after = job(1.0, 1, (0, 1, 2)), job(1.3, 50, (1, 2, 3))
    of = {rank: diff_step_times.partial(trace) for rank, trace in before.items()}
    others = {rank: diff_step_times.partial(trace) for rank, trace in after.items()}
    ranks = compare_ranks(of, others)
    assert told(ranks) == {"rank 1": "slower", "rank 2": "slower"}
    assert ranks.notes == (
        "rank 0 is missing in the other job: not compared",
        "rank 3 is missing in the baseline: not compared",
    )
    mean = compare_jobs(diff_step_times, [of[1], of[2]], [others[1], others[2]]).rows()[0]
    each = ranks.values("baseline_us")
    assert mean["baseline_us"] == pytest.approx(sum(each) / 2)


def test_short_names_put_variants_of_a_kernel_together() -> None:
    first = context({"x": [1.0] * 4}, {"void ns::add<int>(int*)": noisy(50, 4, 1)})
    second = context({"x": [1.0] * 4}, {"void ns::add<long>(long*)": noisy(50, 4, 2)})
    assert set(told(compare(diff_kernel_names, first, second)).values()) == {"new", "gone"}
    assert told(compare(diff_kernel_names, first, second, short_names=True)) == {"ns::add": "within noise"}


def test_a_diff_of_one_trace_is_refused() -> None:
    with pytest.raises(ViewError, match="exactly two traces, not 1"):
        find_view("diff_operators")(Context(trace({})))


def test_two_empty_traces_have_no_difference() -> None:
    empty = Context(trace({}))
    assert len(diff_ops(empty, empty)) == len(diff_kernels(empty, empty)) == 0
    assert told(diff_steps(empty, empty)) == {"other": "unknown"}


def with_inner(inner_us: int) -> Context:
    """Steps with an operator of 20 us and one inside, which launches a kernel of 70 us."""
    events = [
        line
        for number in (1, 2, 3)
        for line in (
            marked(number, 1000 * number, 900),
            event("cpu_op", "aten::linear", 1000 * number + 10, 20 + inner_us),
            event("cpu_op", "aten::mm", 1000 * number + 20, inner_us),
            *launched("gemm", 1000 * number + 22, 1000 * number + 500, 70, number),
        )
    ]
    return of_events(events)


def test_operators_have_totals_of_both_traces_beside_their_own_times() -> None:
    found = compare(diff_operators, with_inner(100), with_inner(200))
    rows = {(row["name"], row["time"]): row for row in found.rows()}
    host, gpu = rows["aten::linear", "host"], rows["aten::linear", "gpu"]
    names = ("baseline_us", "other_us", "delta_us")
    assert [host[name] for name in names] == pytest.approx([20, 20, 0], abs=1e-3)
    assert [host[f"total_{name}"] for name in names] == pytest.approx([120, 220, 100], abs=1e-3)
    assert (host["total_delta_pct"], host["total_verdict"]) == (pytest.approx(100 * 100 / 120), "slower")
    assert ([gpu[name] for name in names], gpu["verdict"]) == ([0, 0, 0], "within noise")  # what it launched itself
    assert [gpu[f"total_{name}"] for name in names] == pytest.approx([70, 70, 0])
    assert found.values("name")[0] == "aten::mm"  # changes of its own come first
    total = {
        (row["name"], row["time"]): row
        for row in compare(diff_operators, with_inner(100), with_inner(200), total=True).rows()
    }
    assert all(row["baseline_us"] == row["total_baseline_us"] for row in total.values())


def test_totals_of_a_job_are_means_over_its_ranks() -> None:
    ranks = [diff_operators.partial(with_inner(length)) for length in (100, 300)]
    row = next(row for row in compare_jobs(diff_operators, ranks, ranks).rows() if row["name"] == "aten::linear")
    assert row["total_baseline_us"] == pytest.approx(220)


SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/home/me/before/train.py(40): augment", "train.py: augment"),
        ("/home/me/models/__init__.py(2): build", "models/__init__.py: build"),
        ("/home/me/run (1)/train.py(40): augment", "train.py: augment"),
        (r"C:\job\train.py(40): augment", "train.py: augment"),
        ("train.py(7): <lambda>", "train.py: <lambda>"),
        ("/opt/v/lib/python3.11/site-packages/torch/optim/adam.py(9): step", "torch/optim/adam.py: step"),
        ("torch/optim/adam.py(9): step", "torch/optim/adam.py: step"),
        ("/usr/lib/python3.11/json/decoder.py(3): decode", "json/decoder.py: decode"),
        ("<built-in method mm of type object at 0x7f12ab>", "<built-in method mm of type object>"),
        ("nn.Module: Linear_0", "nn.Module: Linear_0"),
    ],
)
def test_a_function_is_matched_whatever_its_line_and_folder(text: str, name: str) -> None:
    assert function_name(text) == name


def sampled(folder: str, line: int, augment: float, seed: int) -> Context:
    """Six steps of a second in samples of 1 ms: `augment` in a part of them, else `train`."""
    random, rows, marks = np.random.default_rng(seed), [], []
    for step in range(6):
        start, part = step * SECOND, round(1000 * augment * (1 + 0.02 * random.standard_normal()))
        marks.append({"name": f"ProfilerStep#{step}", "start": start, "duration": SECOND, "thread": 1, "finished": 1})
        for name, first, count in (("augment", 0, part), ("train", part, 1000 - part)):
            where = f"/home/{folder}/train.py({line}): {name}"
            row: dict[str, Any] = {"name": where, "start": start + first * SECOND // 1000, "thread": 1}
            rows.append({**row, "duration": count * SECOND // 1000, "samples": count, "self_samples": count})
    return Context(trace({"python_function": rows, "user_annotation": marks}, sample_period_ns=SECOND // 1000))


def test_a_function_that_became_slower_is_named_from_samples() -> None:
    found = compare(diff_python_functions, sampled("a", 10, 0.2, 1), sampled("b", 12, 0.4, 2)).rows()
    assert [(row["name"], row["verdict"]) for row in found] == [
        ("train.py: augment", "slower"),
        ("train.py: train", "faster"),
    ]
    assert found[0]["baseline_us"] == pytest.approx(200_000, rel=0.05)


def test_the_time_of_recorded_calls_is_that_without_the_calls_inside() -> None:
    def calls(inner: int) -> Context:
        rows, marks = [], []
        for step in range(4):
            at = 10_000 * step
            marks.append({"name": f"ProfilerStep#{step}", "start": at, "duration": 9000, "thread": 1, "finished": 1})
            for name, start, duration in (("f", at + 100, 2000 + inner), ("g", at + 200, inner)):
                rows.append({"name": f"t.py(1): {name}", "start": start, "duration": duration, "thread": 1})
        return Context(trace({"python_function": rows, "user_annotation": marks}))

    found = {row["name"]: row for row in compare(diff_python_functions, calls(1000), calls(3000)).rows()}
    assert (found["t.py: g"]["verdict"], found["t.py: g"]["delta_us"]) == ("slower", 2.0)
    assert (found["t.py: f"]["verdict"], found["t.py: f"]["baseline_us"]) == ("within noise", 2.0)


def test_a_trace_without_python_says_so() -> None:
    found = compare(diff_python_functions, Context(trace({})), Context(trace({})))
    assert len(found) == 0
    assert any("no Python functions" in note for note in found.notes)
