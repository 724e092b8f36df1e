"""What is found of the work of frameworks that own the training loop."""

from typing import Any

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.user_code import user_code
from support.trace_files.sampled_stacks import (
    BACKWARD,
    LINEAR,
    LOADER,
    MAIN,
    MODULE,
    OPTIMIZER,
    PERIOD_NS,
    SITE,
    TORCH,
    Sample,
    sampled,
)

TRAINER = SITE + "trainers/trainer.py"
FIT = (*MAIN, TRAINER + "(5): Trainer.fit", TORCH + "utils/_contextlib.py(9): decorate", TRAINER + "(50): Trainer._run")
STEP = (*FIT, TRAINER + "(90): Trainer.training_step")
AFTER = (*FIT, TRAINER + "(70): Trainer._maybe_log_save_evaluate")
SAVE = (*AFTER, TRAINER + "(200): Trainer._save_checkpoint", TORCH + "serialization.py(900): save")
EVALUATE = (*AFTER, TRAINER + "(300): Trainer._evaluate", TRAINER + "(310): Trainer._loop")
HOOKS = (*FIT, SITE + "trainers/hooks.py(9): Hooks.call")
TRAINING: list[Sample] = [*[(*STEP, MODULE, LINEAR)] * 30, *[(*STEP, BACKWARD)] * 20, *[(*STEP, OPTIMIZER)] * 10]
CALLED = "called in main (train.py:42)"


def found(*extra: Sample, ops: list[dict[str, Any]] | None = None) -> list[Finding]:
    """Findings of 60 samples of training, with 40 others before them; the largest first."""
    findings = user_code(sampled([*extra, *TRAINING], steps=10, ops=ops or []))
    return sorted(findings, key=lambda finding: (-finding.saving_ns, finding.title))


def op(start: int, end: int, **values: int) -> dict[str, Any]:
    times = {"start": start * PERIOD_NS, "duration": (end - start) * PERIOD_NS}
    return {"name": "aten::linear", "thread": 1, "torch_thread": 1, **times, **values}


def test_a_checkpoint_and_an_evaluation_in_one_function_of_a_framework_are_two_findings() -> None:
    model = (*EVALUATE, MODULE, LINEAR)
    engine = {"name": "autograd::engine::evaluate_function: AddmmBackward0", "forward_thread": 1, "scope": 1}
    ops = [op(15, 25), op(40, 70, sequence=7), {**op(70, 90, sequence=7), **engine}]
    ops.append({**ops[-1], "name": "AddmmBackward0"})
    findings = found(*[SAVE] * 15, *[model] * 10, *[EVALUATE] * 5, *[(*STEP, MODULE, LINEAR)] * 10, ops=ops)
    assert [(finding.title, finding.saving_ns // PERIOD_NS) for finding in findings] == [
        (f"Trainer._evaluate of trainers, {CALLED}, runs a model without a backward pass", 15),
        (f"Trainer._save_checkpoint of trainers, {CALLED}, saves a checkpoint", 15),
    ]
    assert {finding.where for finding in findings} == {"main (/job/train.py:42)"}
    assert all(
        finding.evidence.endswith("called by Trainer._maybe_log_save_evaluate, Trainer._run, Trainer.fit")
        for finding in findings
    )


def test_files_and_archives_that_a_function_that_saves_needs_are_the_checkpoint() -> None:
    callback = (*HOOKS, SITE + "trainers/hooks.py(20): ModelCheckpoint.on_batch_end", SITE + "trainers/io.py(1): write")
    findings = found(*[(*callback, SITE + "h5py/_hl.py(5): create")] * 20, *[(*callback, "zipfile.py(9): close")] * 20)
    assert [(finding.title, finding.saving_ns // PERIOD_NS) for finding in findings] == [
        (f"ModelCheckpoint.on_batch_end of trainers, {CALLED}, saves a checkpoint", 40)
    ]


def test_an_evaluation_that_is_told_by_a_name_alone_is_not_said_to_run_a_model() -> None:
    (finding,) = found(*[(*HOOKS, SITE + "trainers/hooks.py(9): EpochScoring.on_epoch_end")] * 40)
    assert finding.title == f"EpochScoring.on_epoch_end of trainers, {CALLED}, evaluates"


def test_a_function_of_a_framework_that_does_different_things_at_two_places_is_two_findings() -> None:
    again = (*FIT, TRAINER + "(60): Trainer._epoch", SITE + "trainers/hooks.py(9): Hooks.call")
    logs = [(*HOOKS, f"{SITE}trainers/hooks.py({number}): Log{number}.print") for number in range(30, 50)]
    findings = found(*logs, *[again] * 20)
    assert [(finding.title, finding.guess, finding.saving_ns // PERIOD_NS) for finding in findings] == [
        (f"Hooks.call of trainers, {CALLED}, spends part of the step on work other than training", True, 20),
        (f"Hooks.call of trainers, {CALLED}, writes logs", False, 20),
    ]


def test_an_evaluation_by_a_framework_that_the_program_calls_is_told_with_its_setting() -> None:
    evaluate = (*MAIN, "/job/train.py(60): check", SITE + "lightning/pytorch/trainer/trainer.py(9): Trainer.validate")
    engine = {"name": "autograd::engine::evaluate_function: AddmmBackward0", "forward_thread": 1, "scope": 1}
    ops = [op(0, 25), op(40, 70, sequence=7), {**op(70, 90, sequence=7), **engine}]
    ops.append({**ops[-1], "name": "AddmmBackward0"})
    (finding,) = found(*[(*evaluate, MODULE, LINEAR)] * 30, *[(*evaluate, LOADER)] * 10, ops=ops)
    assert (
        finding.title
        == "Trainer.validate of lightning, called in check (train.py:42), runs a model without a backward pass"
    )
    assert finding.advice.endswith("val_check_interval, check_val_every_n_epoch, limit_val_batches.")
    assert finding.saving_ns == 30 * PERIOD_NS


def test_a_function_that_a_framework_calls_back_is_named_before_the_framework() -> None:
    log = "/job/board.py(3): Board.on_step"
    (finding,) = found(*[(*HOOKS, log)] * 36, *[HOOKS] * 4)
    assert (finding.where, finding.guess) == ("Board.on_step (/job/board.py:42)", False)
    assert finding.saving_ns == 40 * PERIOD_NS


def test_functions_that_a_framework_calls_back_in_one_place_are_findings_of_their_own() -> None:
    log, send = "/job/board.py(3): Board.on_step", "/job/board.py(30): Sender.on_step"
    findings = found(*[(*HOOKS, log)] * 22, *[(*HOOKS, send)] * 18)
    assert [(finding.where, finding.saving_ns // PERIOD_NS) for finding in findings] == [
        ("Board.on_step (/job/board.py:42)", 22),
        ("Sender.on_step (/job/board.py:42)", 18),
    ]


def test_functions_that_a_framework_calls_back_deep_inside_are_findings_of_their_own() -> None:
    one, other = (f"{SITE}trainers/hooks.py({line}): Hooks.{name}" for line, name in ((50, "early"), (60, "late")))
    log, send = "/job/board.py(3): Board.on_step", "/job/board.py(30): Sender.on_step"
    findings = found(*[(*HOOKS, one, log)] * 22, *[(*HOOKS, other, send)] * 18)
    assert [(finding.where, finding.saving_ns // PERIOD_NS) for finding in findings] == [
        ("Board.on_step (/job/board.py:42)", 22),
        ("Sender.on_step (/job/board.py:42)", 18),
    ]


def test_the_only_function_that_a_framework_calls_back_is_named_for_what_the_framework_does_for_it() -> None:
    step = "/job/model.py(3): Net.validation_step"
    (finding,) = found(*[(*EVALUATE, step)] * 28, *[EVALUATE] * 12)
    assert (finding.where, finding.saving_ns // PERIOD_NS) == ("Net.validation_step (/job/model.py:42)", 40)


def test_what_a_framework_does_itself_beside_the_training_is_a_guess_and_told_once() -> None:
    own = TRAINER + "(400): Trainer.book_keeping"
    small = [(*FIT, f"{TRAINER}({number}): Trainer.part_{number}") for number in range(500, 520)]
    findings = found(*[(*FIT, own)] * 20, *small)
    assert [(finding.title, finding.guess, finding.saving_ns // PERIOD_NS) for finding in findings] == [
        (f"Trainer.book_keeping of trainers, {CALLED}, spends part of the step on work other than training", True, 20),
        (f"Trainer.fit of trainers, {CALLED}, spends part of the step on work other than training", True, 20),
    ]


def test_small_parts_of_a_framework_that_do_the_same_are_one_claim() -> None:
    log = SITE + "tqdm/std.py"
    findings = found(*[(*FIT, f"{log}({number}): part_{number}") for number in range(500, 540)])
    assert [(finding.title, finding.guess) for finding in findings] == [
        (f"Trainer.fit of trainers, {CALLED}, writes logs", False)
    ]


def test_a_framework_that_clips_gradients_is_told_so_with_its_setting() -> None:
    clip = SITE + "transformers/trainer.py(7): Trainer._clip_grad_norm"
    (finding,) = found(*[(*FIT, clip, TORCH + "nn/utils/clip_grad.py(9): clip_grad_norm_")] * 40)
    assert finding.title == f"Trainer._clip_grad_norm of transformers, {CALLED}, clips gradients"
    assert finding.advice.endswith("See TrainingArguments: max_grad_norm.")


def test_a_library_that_the_programs_own_loop_calls_is_not_divided() -> None:
    save = (*MAIN, SITE + "board/api.py(1): publish")
    own: list[Sample] = [*[(*MAIN, MODULE, LINEAR)] * 40, *[(*MAIN, BACKWARD)] * 30]
    inner = [(*save, SITE + "board/api.py(9): pack")] * 15 + [(*save, SITE + "board/api.py(19): send")] * 15
    (finding,) = user_code(sampled([*own, *inner]))
    assert finding.title == f"publish of board, {CALLED}, takes up part of the step, but does no training"
