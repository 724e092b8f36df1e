"""What a reader sees first."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from kineto_trace.analysis.host_findings.standing import STANDS_STILL
from kineto_trace.catalog.first_screen import FirstScreen, Runs, find_runs, first_requests, first_screen, verdict
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.catalog.view_runner import run_views
from kineto_trace.open.trace_discovery import find_traces
from kineto_trace.store.parquet_folder import save_columns
from kineto_trace.view_api.result import Result, make_result
from support.trace_files.sampled_stacks import (
    BACKWARD,
    LINEAR,
    MAIN,
    MODULE,
    OPTIMIZER,
    SITE,
    Sample,
    sampled_trace,
)
from support.trace_files.traces import START_NS, target, trace

US, MS = 1000, 1_000_000
EVALUATE = "autograd::engine::evaluate_function: LinearBackward0"
H200 = Path(__file__).parents[3] / "data/h200"


def screen(*paths: Path) -> FirstScreen:
    results = run_views(first_requests(len(paths)), paths)
    return first_screen(results, len(paths))


def job(folder: Path, *targets: dict[str, Any]) -> list[Path]:
    kernels = [{"name": "k", "start": 100 * n * US, "duration": 60 * US} for n in range(3)]
    paths = [folder / f"rank{rank}" for rank in range(len(targets))]
    for rank, (path, told) in enumerate(zip(paths, targets, strict=True)):
        save_columns(trace({"kernel": kernels}, length_ns=300 * US, target=target(rank=rank, **told)), path)
    return paths


def test_of_one_trace_the_shares_of_its_gpu_come_first_and_the_cause_is_their_first_column(tmp_path: Path) -> None:
    found = screen(*job(tmp_path, {}))
    assert (found.time.view, found.time.columns[0].name) == ("time_causes", "cause")
    assert sum(found.time.values("share_pct")) == pytest.approx(100)


def test_of_several_ranks_each_finding_is_there_once_with_what_the_job_would_gain() -> None:
    found = screen(*sorted((H200 / "ddp4").iterdir()))
    titles = found.findings.values("title")
    assert titles and len(titles) == len(set(titles)) and all("on 4 of 4 ranks" in title for title in titles)
    assert sum(found.time.values("share_pct")) == pytest.approx(100)
    assert found.verdict == (
        "A step takes 19.9 ms on average on each of 4 ranks. Matrix products do not use the tensor cores (on 4 of 4 "
        "ranks). Use bfloat16 or float16, or TF32 for float32, or float8 for the largest products. That could save up "
        "to 10.5 ms a step (52 %, likely)."
    )


LIGHTNING = f"{SITE}lightning/pytorch/"
IN_OPTIMIZER = (
    MAIN[0],
    f"{LIGHTNING}trainer/trainer.py(530): Trainer.fit",
    OPTIMIZER,
    f"{SITE}torch/optim/sgd.py(100): SGD.step",
)
IN_CLOSURE = (
    *IN_OPTIMIZER,
    f"{LIGHTNING}plugins/precision/precision.py(90): Precision._wrap_closure",
    f"{LIGHTNING}loops/optimization/automatic.py(129): Closure.__call__",
)


def test_in_lightning_the_training_step_is_not_the_optimizer_that_calls_it(tmp_path: Path) -> None:
    training = (*IN_CLOSURE, "/job/train.py(30): Net.training_step")
    step = [(training, "idle")] * 4 + [(*training, MODULE, LINEAR)] * 2 + [(*IN_CLOSURE, BACKWARD)] * 2
    ops, annotations = [], []
    for at in range(0, 1000 * MS, 100 * MS):
        number = {"sequence": at // MS, "thread": 1}
        ops += [
            {"name": "aten::linear", "start": at + 40 * MS, "duration": 20 * MS, "torch_thread": 1, **number},
            {"name": EVALUATE, "start": at + 60 * MS, "duration": 20 * MS, "forward_thread": 1, **number},
        ]
        annotations.append({"name": "Optimizer.step#SGD.step", "start": at, "duration": 100 * MS})
    samples: list[Sample] = [*step, IN_OPTIMIZER, IN_OPTIMIZER] * 10
    save_columns(sampled_trace(samples, steps=10, ops=ops, annotations=annotations), tmp_path / "trace")
    found = screen(tmp_path / "trace")
    assert found.verdict.startswith("A step takes 100 ms on average. Net.training_step (train.py:42) waits. ")
    shares = [(row["cause"], row["share_pct"], row["what"]) for row in found.time.rows()]
    assert shares[0] == ("host_other", 40.0, "Net.training_step (/job/train.py:42)")
    assert shares[-1] == ("host_optimizer", 20.0, "<module> (/job/train.py:42)")


def test_facts_that_differ_over_the_ranks_are_listed_and_the_first_ones_of_many(tmp_path: Path) -> None:
    hosts = [
        {"host": f"h{rank}", "pid": 10 + rank, "world_size": 8, "command": ["python", "t.py"], "job_id": "17"}
        for rank in range(6)
    ]
    facts = dict(screen(*job(tmp_path, *hosts)).facts)
    assert facts["host"] == "h0, h1, h2, h3 and 2 more"
    assert (facts["process"], facts["ranks"]) == ("python (pids 10-15)", "6 of 8")
    assert (facts["job"], facts["command"], facts["window"]) == ("17", "python t.py", "300 µs")
    assert "GPU" not in facts and "CUDA" not in facts


def test_the_text_of_a_fact_stays_on_its_line(tmp_path: Path) -> None:
    facts = dict(screen(*job(tmp_path, {"host": "a\n\x1b[2J"})).facts)
    assert facts["host"] == r"a\x0a\x1b[2J"


def test_several_captures_of_a_rank_are_no_ranks(tmp_path: Path) -> None:
    one = sorted((H200 / "ddp4").iterdir())[0]
    found = screen(*(Path(copy(one, tmp_path / f"{number}.json.gz")) for number in range(3)))
    titles = found.findings.values("title")
    assert titles and all("in 3 of 3 captures" in title for title in titles)
    assert found.verdict.startswith("A step takes 19.9 ms on average in 3 captures. ")
    assert "on rank" not in found.verdict


CAUSE = {"device": 0, "share_pct": 70.4, "step_us": 100.0, "meaning": "GPU computes: other kernels"}
FINDING = {
    "rank": 0, "finding": "host_bound", "title": "The host is late", "saving_us": 36_000.0, "saving_pct": 36.0,
    "saving_per_step_us": 36.0, "uncertainty_pct": 1.5, "guess": False, "advice": "Hurry (a lot). It is late.",
}  # fmt: skip


def told(findings: list[dict[str, Any]], *causes: dict[str, Any], ranks: int = 1, notes: Sequence[str] = ()) -> str:
    """The verdict on results with these rows, and these notes of the findings."""

    def result(name: str, rows: Sequence[dict[str, Any]]) -> Result:
        values = {column.name: [row.get(column.name) for row in rows] for column in VIEWS[name].result_columns}
        return make_result(name, VIEWS[name].result_columns, values)

    found = replace(result("findings", findings), notes=tuple(notes))
    return verdict(found, result("time_causes", causes), ranks=ranks, traces=ranks)


def test_the_verdict_is_the_step_and_what_saves_most_of_it() -> None:
    assert told([FINDING], CAUSE) == (
        "A step takes 100 µs on average. The host is late. Hurry. That could save up to 36 µs a step (36 %, measured)."
    )


def test_what_limits_the_verdict_is_its_end() -> None:
    note = "the training thread waited for a CPU for 50 % of the time: other processes used 1.2 of the host's 2 cores"
    assert told([FINDING], CAUSE, notes=[note]).endswith(f" (36 %, measured). T{note[1:]}.")
    assert told([], CAUSE, notes=[note]).endswith(f" half a per cent or more. T{note[1:]}.")
    assert told([], notes=[note]) == f"T{note[1:]}."
    left_out = "the first 3 s, 34 % of the trace, are left out: they end with a gap"
    assert told([FINDING], CAUSE, notes=[left_out, note]).endswith(f" (36 %, measured). T{left_out[1:]}. T{note[1:]}.")


def test_a_finding_without_advice_still_says_what_it_would_save() -> None:
    assert told([{**FINDING, "advice": None}], CAUSE).endswith(
        " The host is late. Changing that could save up to 36 µs a step (36 %, measured)."
    )


@pytest.mark.parametrize("name", ["host_annotation", "waiting_in_collectives"])
def test_advice_that_only_finds_the_cause_saves_nothing_by_itself(name: str) -> None:
    assert told([{**FINDING, "finding": name, "advice": "Look closer."}], CAUSE).endswith(
        " The host is late. Changing that could save up to 36 µs a step (36 %, measured). Look closer."
    )


def test_without_steps_the_verdict_is_about_the_recorded_time() -> None:
    found = {**FINDING, "saving_per_step_us": None, "saving_pct": 3.25}
    assert told([found], {**CAUSE, "step_us": None}) == (
        "The host is late. Hurry. That could save up to 36 ms of the recorded time (3.2 %, measured)."
    )


def test_a_finding_that_may_save_nothing_is_called_a_rough_estimate_behind_the_largest_cause() -> None:
    assert told([{**FINDING, "guess": True}], CAUSE) == (
        "A step takes 100 µs on average. 70 % of it is computation on the GPU: other kernels. Most promising, "
        "by a rough estimate: the host is late. Hurry."
    )


def test_where_nothing_helps_the_verdict_says_so() -> None:
    idle = {**CAUSE, "step_us": None, "meaning": "GPU idle: the host sleeps"}
    assert told([], idle) == (
        "70 % of the recorded time is time in which the GPU is idle: the host sleeps. No finding would save half "
        "a per cent or more."
    )
    assert told([]) == ""


def test_a_finding_that_one_rank_of_a_job_has_names_it() -> None:
    for title, shown in (
        ("The host is late", "The host is late (on rank 0)"),
        ("The host is late; the others wait for rank 0", "The host is late; the others wait for rank 0"),
        ("The host is late (on 2 of 4 ranks)", "The host is late (on 2 of 4 ranks)"),
    ):
        found = told([{**FINDING, "title": title}], CAUSE, ranks=4)
        assert found.startswith(f"A step takes 100 µs on average on each of 4 ranks. {shown}. Hurry. That could ")


@pytest.mark.parametrize(
    ("title", "where", "shown"),
    [
        (
            "The GPU waits",
            "Images.get (/a/a job/train.py:13)",
            "The GPU waits, mostly in Images.get (train.py:13)",
        ),
        ("Images.get waits", "Images.get (train.py:13)", "Images.get waits"),
        ("The thread waits", "thread 12", "The thread waits"),
    ],
)
def test_the_verdict_has_the_place_that_the_title_lacks(title: str, where: str, shown: str) -> None:
    assert f" {shown}. Hurry. " in told([{**FINDING, "title": title, "where": where}], CAUSE)


def test_the_place_of_a_finding_that_several_ranks_have_is_that_of_the_worst_one() -> None:
    found = told([{**FINDING, "title": "It waits (on 2 of 2 ranks)", "where": "get (/a.py:3)"}], CAUSE, ranks=2)
    assert " It waits (on 2 of 2 ranks), on rank 0 mostly in get (a.py:3). Hurry. " in found


def test_a_step_of_several_gpus_is_as_long_as_that_of_each() -> None:
    assert told([FINDING], CAUSE, {**CAUSE, "device": 1}).startswith("A step takes 100 µs on average. ")


def test_where_nothing_moves_the_verdict_says_where_each_rank_stands() -> None:
    rows = [
        {**FINDING, "rank": rank, "finding": STANDS_STILL, "title": f"Nothing moved: the main thread {where}"}
        for rank, where in ((1, "waits for a lock in load (a.py:6)"), (0, "waits in all_reduce (on 3 of 4 ranks)"))
    ]
    assert told(rows[:1]) == "Nothing moved: the main thread waits for a lock in load (a.py:6)."
    assert told(rows[:1], ranks=2) == "Nothing moved on rank 1: the main thread waits for a lock in load (a.py:6)."
    assert told(rows, ranks=4) == (
        "Nothing moved. Rank 1: the main thread waits for a lock in load (a.py:6). The main thread waits in all_reduce "
        "(on 3 of 4 ranks)."
    )


def runs_at(folder: Path, *starts_ns: int, name: str = "run{}", **told: Any) -> Runs | None:
    """The runs that traces are whose windows of 300 µs begin at these times after START_NS, each of another process."""
    for number, start in enumerate(starts_ns):
        kernels = [{"name": "k", "start": start + 100 * n * US, "duration": 60 * US} for n in range(3)]
        window = {"window_start_ns": START_NS + start, "window_end_ns": START_NS + start + 300 * US}
        save_columns(
            trace({"kernel": kernels}, target=target(pid=10 + number, **told), **window), folder / name.format(number)
        )
    return find_runs(find_traces(folder))


def test_traces_one_after_the_other_are_runs_and_those_at_the_same_time_are_not(tmp_path: Path) -> None:
    found = runs_at(tmp_path / "runs", 10**9, 0)
    assert found is not None and found.newest.path.name == "run0"
    assert found.table.values("trace") == ["run0", "run1"]
    assert found.verdict.startswith("These are 2 consecutive runs, not ranks of one job. `kinetoctl diff ")
    assert runs_at(tmp_path / "job", 100 * US, 0) is None


def test_traces_that_say_that_they_are_ranks_are_no_runs(tmp_path: Path) -> None:
    starts = (0, 10**9)
    assert runs_at(tmp_path / "names", *starts, name="rank{}") is None
    assert runs_at(tmp_path / "world", *starts, world_size=2) is None
    assert runs_at(tmp_path / "alone", starts[0]) is None
    assert runs_at(tmp_path / "single", *starts, world_size=1) is not None
