"""Compares what findings say with what was planted."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootcause.causes import Cause

CLAIM_PCT = 5.0  # a control's finding of so much must be true
TOLERANCE_POINTS = 20.0
NO_PROCESSOR = "no_processor"
_PLACE = ("title", "where", "op", "call_stack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one cause. share_pct: of the step, as measured. place: of the finding that names it; 0: none.

    predicted_pct: of that finding. top: the first three findings. false_claims: findings about the control of more than
    CLAIM_PCT. sentence: the verdict on the trace; "": there is none that could name the cause.
    """

    cause: Cause
    with_ms: float
    without_ms: float
    top: tuple[str, ...]
    place: int
    predicted_pct: float | None
    false_claims: tuple[str, ...]
    sentence: str = ""

    @property
    def should_be_said(self) -> bool:
        """Whether the sentence must name the cause, since the first finding does."""
        return self.place == 1 and self.sentence != ""

    @property
    def is_said(self) -> bool:
        """Whether the sentence says where the cause is and what to do about it."""
        return all(re.search(wanted, self.sentence, re.IGNORECASE) for wanted in (self.cause.where, self.cause.remedy))

    @property
    def first(self) -> str:
        """The first finding; "": there is none."""
        return self.top[0] if self.top else ""

    @property
    def share_pct(self) -> float:
        """The share of the step that the cause takes."""
        return 100 * (1 - self.without_ms / self.with_ms)

    @property
    def saving_is_right(self) -> bool:
        """Whether the prediction is close to what taking the cause away gained."""
        return self.predicted_pct is not None and abs(self.predicted_pct - self.share_pct) <= TOLERANCE_POINTS


def names(finding: Mapping[str, Any], cause: Cause) -> bool:
    """Tells whether the finding says where the cause is and what to do about it."""
    place = " ".join(str(finding[key]) for key in _PLACE if finding.get(key))
    return all(
        re.search(wanted, text, re.IGNORECASE)
        for wanted, text in ((cause.where, place), (cause.remedy, str(finding["advice"])))
    )


def without_neighbours(findings: Sequence[Mapping[str, Any]], waited_pct: float) -> list[Mapping[str, Any]]:
    """The findings without the one that other programs took the processors, if the kernel counted such a wait too."""
    return [
        row
        for row in findings
        if row["finding"] != NO_PROCESSOR
        or waited_pct < CLAIM_PCT
        or abs(row["saving_pct"] - waited_pct) > TOLERANCE_POINTS
    ]


def judge(
    cause: Cause,
    planted: tuple[float, Sequence[Mapping[str, Any]]],
    control: tuple[float, Sequence[Mapping[str, Any]]],
    sentence: str = "",
) -> Verdict:
    """planted, control: mean step (ms) and findings, the first one first. sentence: the verdict on the planted one."""
    findings = planted[1]
    place = next((number for number, finding in enumerate(findings, 1) if names(finding, cause)), 0)
    return Verdict(
        cause=cause,
        with_ms=planted[0],
        without_ms=control[0],
        top=tuple(_short(finding) for finding in findings[:3]),
        place=place,
        predicted_pct=findings[place - 1]["saving_pct"] if place else None,
        false_claims=tuple(_short(row) for row in control[1] if (row["saving_pct"] or 0.0) > CLAIM_PCT),
        sentence=sentence,
    )


def _short(finding: Mapping[str, Any]) -> str:
    saving = finding["saving_pct"]
    return f"{finding['title']} {'?' if saving is None else format(saving, '.0f')} %"
