"""What a finding says to do."""

import pytest
from kineto_trace.analysis.finding import (
    BLOCKED,
    BUSY,
    FRAMEWORK,
    LOADING,
    PAGING,
    PINNING,
    REMEDIES,
    remedy,
)
from kineto_trace.structure.library_calls import CallKind


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
        (PINNING, "Give this DataLoader thread less to do: smaller types, fewer, larger tensors per batch, and "
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


@pytest.mark.parametrize("advice", [*REMEDIES.values(), BLOCKED, BUSY, FRAMEWORK, PAGING, PINNING])
def test_the_remedy_begins_with_what_to_do(advice: str) -> None:
    assert remedy({"advice": advice}).split()[0] not in {"Look", "The", "They", "This"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (CallKind.NONE, "Run this line less often, or in another thread or process"),
        (CallKind.WAIT, "Hand over work without waiting for the result, hold locks for less time, or make the other "
         "thread or process faster"),
        (CallKind.HASH, "Hash less often, or in another thread or process: a digest reads every byte"),
    ],
)  # fmt: skip
def test_the_remedy_needs_nothing_before_it_to_be_understood(kind: CallKind, text: str) -> None:
    assert remedy({"advice": REMEDIES[kind]}) == text
