"""What is found of the program's own code in the steps."""

from typing import Any

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.user_code import user_code
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import (
    BACKWARD,
    FORWARD,
    LINEAR,
    MAIN,
    MODULE,
    OPTIMIZER,
    PERIOD_NS,
    SITE,
    Sample,
    sampled,
    sampled_trace,
)

STDLIB = "/usr/lib/python3.11/"
TRAINING: list[Sample] = [*[FORWARD] * 40, *[(*MAIN, BACKWARD)] * 40]


def found(*extra: Sample, steps: int = 10) -> list[Finding]:
    return list(user_code(sampled([*TRAINING, *extra], steps=steps)))


def test_a_step_of_forward_and_backward_alone_has_no_finding() -> None:
    assert found() == []


def test_a_function_that_sleeps_is_named_with_file_line_and_share() -> None:
    (finding,) = found(*[((*MAIN, "/job/limits.py(7): RateLimit.wait"), "idle")] * 20)
    assert finding.title == "RateLimit.wait (limits.py:42) waits"
    assert finding.where == "RateLimit.wait (/job/limits.py:42)"
    assert finding.name == "user_code_blocked"
    assert finding.saving_ns == 200_000_000
    assert finding.evidence.startswith(
        "20 ms of each step (20 %), ±8 points; seen at 20 of 100 moments in 2 of 10 steps"
    )


def test_a_folder_with_parentheses_is_the_programs_too() -> None:
    (finding,) = found(*[((*MAIN, "/home/me/run (1)/limits.py(7): RateLimit.wait"), "idle")] * 20)
    assert finding.where == "RateLimit.wait (/home/me/run (1)/limits.py:42)"


@pytest.mark.parametrize("part", ["<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"])
def test_a_comprehension_is_a_part_of_the_function_that_contains_it(part: str) -> None:
    holder = (*MAIN, "/job/metrics.py(20): Metrics.send")
    inside = (*holder, f"/job/metrics.py(22): Metrics.send.<locals>.{part}")
    (finding,) = user_code(sampled([*[holder] * 10, *[inside] * 30, *[FORWARD] * 60]))
    assert finding.title.startswith("Metrics.send (metrics.py")
    assert finding.saving_ns == pytest.approx(40 * PERIOD_NS)


def test_time_in_a_library_belongs_to_the_function_that_calls_it() -> None:
    stack = (
        *MAIN,
        "/job/board.py(3): publish",
        STDLIB + "json/__init__.py(183): dumps",
        STDLIB + "json/encoder.py(1): x",
    )
    (finding,) = found(*[stack] * 20)
    assert (finding.title, finding.name) == ("publish (board.py:42) writes or reads JSON", "user_code_json")


def handed_over(*callees: str) -> Finding:
    stack = (*MAIN, "/job/work.py(3): hand_over")
    (finding,) = found(*[(stack, f"running in {callee}" if callee else "running") for callee in callees])
    return finding


@pytest.mark.parametrize(
    ("callee", "name", "what"),
    [
        ("pickle.dumps", "user_code_pickle", "pickles objects"),
        ("value.tolist", "user_code_item", "reads tensors one number at a time"),
        ("zlib.compress", "user_code_archive", "compresses or unpacks data"),
        ("hashlib.sha256", "user_code_hash", "computes hashes"),
        ("gc.collect", "user_code_garbage", "collects garbage"),
        ("self.connection.commit", "user_code_database", "uses a database"),
        ("np.array", "user_code_convert", "converts Python objects to arrays"),
        ("print", "user_code_logging", "writes logs"),
        ("time.sleep", "user_code_sleep", "sleeps"),
        ("os.fsync", "user_code_file", "reads or writes files"),
    ],
)
def test_the_c_function_that_a_line_calls_tells_what_it_is_for(callee: str, name: str, what: str) -> None:
    finding = handed_over(*[callee] * 20)
    assert (finding.name, finding.title) == (name, f"hand_over (work.py:42) {what}")
    assert finding.evidence.endswith(f"; 100 % in {callee} (line 42)")


def test_the_callees_with_most_of_the_time_are_named() -> None:
    finding = handed_over(*["pickle.dumps"] * 11, *["value.tolist"] * 8, "len")
    assert finding.name == "user_code_pickle"
    assert finding.evidence.endswith("; 55 % in pickle.dumps (line 42); 40 % in value.tolist (line 42)")


@pytest.mark.parametrize("callees", [["update"] * 20, ["pickle.dumps"] * 7 + [""] * 13])
def test_a_callee_that_is_not_known_or_seldom_tells_nothing_about_the_rest(callees: list[str]) -> None:
    assert handed_over(*callees).name == "user_code"


def test_python_functions_of_a_known_kind_take_precedence_over_the_c_functions_that_they_call() -> None:
    stack = (*MAIN, "/job/board.py(3): publish", STDLIB + "json/__init__.py(183): dumps")
    (finding,) = found(*[(stack, "running in value.tolist")] * 20)
    assert finding.name == "user_code_json"


def test_what_a_slice_that_ends_too_early_has_called_is_still_its_own() -> None:
    publish = "/job/board.py(3): publish"
    stack = (*MAIN, publish, STDLIB + "json/__init__.py(183): dumps")
    trace = sampled_trace([*TRAINING, *[stack] * 20], steps=10)
    table = trace.table("python_function")
    table["duration"][table["name"] == trace.strings.index(publish)] = 0
    (finding,) = user_code(Context(trace))
    assert finding.title == "publish (board.py:42) writes or reads JSON"


def test_what_an_optimizer_calls_in_its_closure_is_not_the_optimizer() -> None:
    steps = (*MAIN, OPTIMIZER, "/job/train.py(30): main.<locals>.closure")
    (finding,) = found(*[(*steps, MODULE, LINEAR)] * 20, *[(*steps, "/job/board.py(3): publish")] * 20)
    assert (finding.where, finding.saving_ns) == ("publish (/job/board.py:42)", 200_000_000)


def test_a_function_that_waits_for_a_lock_of_torch_distributed_waits_in_collectives() -> None:
    reduces = (*MAIN, "/job/average.py(3): average", SITE + "torch/distributed/distributed_c10d.py(2810): all_reduce")
    (finding,) = found(*[(reduces, "idle")] * 20)
    assert (finding.title, finding.name) == ("average (average.py:42) waits in collectives", "user_code_collective")


def test_what_the_loop_calls_in_a_library_is_named_after_both() -> None:
    save = SITE + "torch/serialization.py(900): save"
    (finding,) = found(*[(*MAIN, save, SITE + "torch/storage.py(1): write")] * 20)
    assert finding.title == "save, called in main (train.py:42), saves a checkpoint"
    assert finding.where == "main (/job/train.py:42)"


def test_a_wrapper_is_not_named_for_the_function_that_has_its_time() -> None:
    stack = (*MAIN, "/job/a.py(1): Callback.after_step", "/job/b.py(1): digest")
    (finding,) = found(*[stack] * 20)
    assert finding.where == "digest (/job/b.py:42)"


def test_without_any_training_each_function_is_told_for_what_it_does_itself() -> None:
    crop, main, dumps = "/job/a.py(9): crop", MAIN[:1], STDLIB + "json/__init__.py(183): dumps"
    samples: list[Sample] = [*[(*main, "/job/a.py(1): load", crop)] * 50, *[(*main, "/job/b.py(3): fit")] * 30]
    findings = sorted(user_code(sampled([*samples, *[(*main, dumps)] * 20], steps=10)), key=lambda it: -it.saving_ns)
    assert [(finding.title, finding.saving_ns, finding.guess) for finding in findings] == [
        ("crop (a.py:42) takes up part of the time", 500_000_000, True),
        ("fit (b.py:42) takes up part of the time", 300_000_000, True),
        ("dumps, called in <module> (train.py:42), writes or reads JSON", 200_000_000, False),
    ]


def test_helpers_of_one_function_are_one_finding() -> None:
    caller = (*MAIN, "/job/a.py(1): augment")
    (finding,) = found(*[(*caller, "/job/a.py(9): crop")] * 10, *[(*caller, "/job/a.py(20): blur")] * 10)
    assert finding.where.startswith("augment (/job/a.py")
    assert finding.saving_ns == 200_000_000


def test_forward_in_the_users_own_module_is_no_finding() -> None:
    forward = (*MAIN, MODULE, "/job/model.py(5): Net.forward")
    assert found(*[(*forward, MODULE, LINEAR)] * 20, *[forward] * 20) == []


def test_waiting_in_the_users_own_forward_is_found() -> None:
    stack = (*MAIN, MODULE, "/job/model.py(5): Net.forward", "/job/model.py(30): log_shapes")
    (finding,) = found(*[(stack, "idle")] * 20)
    assert finding.where == "log_shapes (/job/model.py:42)"


def test_less_than_the_noise_of_samples_is_no_finding() -> None:
    assert found((*MAIN, "/job/a.py(1): log")) == []


def test_a_function_in_which_operators_begin_all_the_time_is_told_so_although_no_sample_saw_one() -> None:
    stack = (*MAIN, "/job/clip.py(3): clip_gradients")
    length = PERIOD_NS // 200
    ops = [
        {"name": "aten::norm", "start": 80 * PERIOD_NS + n * length + 1, "duration": length // 4, "thread": 1}
        for n in range(20 * 200)
    ]
    (finding,) = user_code(sampled([*TRAINING, *[stack] * 20], ops=ops))
    assert finding.title == "clip_gradients (clip.py:42) runs operators that are not part of the training"


def neighbours(count: int, name: str, *, sample: int) -> list[dict[str, Any]]:
    """So many short operators in the first millisecond of the sample."""
    length = 1_000_000 // count
    return [
        {"name": name, "start": sample * PERIOD_NS + n * length + 1, "duration": length // 2, "thread": 1}
        for n in range(count)
    ]


def test_pure_python_among_operators_of_other_functions_runs_no_operators() -> None:
    prepare = (*MAIN, "/job/prepare.py(3): prepare")
    ops = [op for sample in range(80, 100) for op in neighbours(100, "aten::randn", sample=sample)]
    (finding,) = user_code(sampled([*TRAINING, *[prepare] * 20], ops=ops))
    assert (finding.name, finding.saving_ns) == ("user_code", 200_000_000)


def test_a_few_moments_among_many_operators_do_not_outvote_the_others() -> None:
    prepare = (*MAIN, "/job/prepare.py(3): prepare")
    dense = [op for sample in range(80, 83) for op in neighbours(900, "aten::randn", sample=sample)]
    length = PERIOD_NS // 10
    aside = [
        {"name": "aten::stack", "start": n * length + 1, "duration": length - 2, "thread": 1}
        for n in range(40 * 10, 60 * 10)
    ]
    (finding,) = user_code(sampled([*TRAINING, *[prepare] * 20], ops=[*aside, *dense]))
    assert finding.name == "user_code"


def test_operators_of_the_training_are_not_those_of_the_function_beside_it() -> None:
    prepare = (*MAIN, "/job/prepare.py(3): prepare")
    length = PERIOD_NS // 200
    updates = [
        {"name": "aten::add_", "start": 80 * PERIOD_NS + n * length + 1, "duration": length // 4, "thread": 1}
        for n in range(20 * 200)
    ]
    step = {"name": "Optimizer.step#SGD.step", "start": 80 * PERIOD_NS, "duration": 20 * PERIOD_NS, "thread": 1}
    (finding,) = user_code(sampled([*TRAINING, *[prepare] * 20], ops=updates, annotations=[step]))
    assert finding.name == "user_code"
