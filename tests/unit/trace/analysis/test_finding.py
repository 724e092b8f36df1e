"""What a finding promises, how sure that is, and what it says to do."""

from typing import Any

import pytest
from kineto_trace.analysis.finding import (
    BLOCKED,
    FRAMEWORK,
    LOADING,
    PAGING,
    PINNING,
    REMEDIES,
    confidence,
    remedy,
)
from kineto_trace.structure.library_calls import CallKind
from kineto_trace.view_api.cell_texts import saving

ROW = {
    "finding": "pageable_copies", "saving_us": 36_000.0, "saving_pct": 36.0, "saving_per_step_us": 36.0,
    "uncertainty_pct": 2.0, "guess": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({}, "measured"),
        ({"uncertainty_pct": 20.0}, "likely"),
        ({"uncertainty_pct": None}, "likely"),
        ({"finding": "no_tensor_cores"}, "likely"),
        ({"guess": True}, "a rough estimate"),
    ],
)
def test_only_a_saving_that_varies_little_and_assumes_nothing_is_measured(changed: dict[str, Any], word: str) -> None:
    assert confidence({**ROW, **changed}) == word


def test_a_saving_has_its_confidence_behind_its_share() -> None:
    assert saving(ROW) == "save up to 36 µs a step (36 %)"
    assert saving(ROW, "measured") == "save up to 36 µs a step (36 %, measured)"


@pytest.mark.parametrize(
    ("advice", "text"),
    [
        (LOADING.format(more="More."), "Load batches ahead of time and in parallel: "
         "DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…)"),
        (REMEDIES[CallKind.LOGGING], "Log less often, or hand the records to another thread"),
        (REMEDIES[CallKind.ITEM], "Do not read tensors one number at a time in Python: vectorise the computation, and "
         "read one result"),
        (REMEDIES[CallKind.CLIP], "Clip all gradients at once with torch.nn.utils.clip_grad_norm_(…, foreach=True) or "
         "a fused optimizer that clips, or not at all if their norm never reaches the limit"),
        (PINNING, "Give this DataLoader thread less to do: smaller types, fewer and larger tensors per batch, and "
         "nothing in a batch that the training does not need"),
        (BLOCKED, "Remove the wait, move it to another thread, or prepare ahead of time what the thread waits for"),
        (FRAMEWORK, "Leave out callbacks, hooks, metrics and logs that are not needed in every step, or do more per "
         "step"),
        (PAGING, "Check for swapping, use less memory or add memory, and read mapped files ahead of time in worker "
         "processes"),
        (None, ""),
    ],
)  # fmt: skip
def test_the_remedy_is_the_first_clause_of_the_advice_without_asides(advice: str | None, text: str) -> None:
    assert remedy({"advice": advice}) == text
