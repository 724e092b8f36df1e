"""The table of all causes, and the confusion summary."""

from collections import Counter
from collections.abc import Sequence

from rootcause.judgement import CLAIM_PCT, TOLERANCE_POINTS, Verdict

_TITLE_CHARS = 70


def row(verdict: Verdict) -> str:
    """One line of the table."""
    predicted = "   -" if verdict.predicted_pct is None else f"{verdict.predicted_pct:4.0f}"
    return (
        f"{verdict.cause.name:<24}{verdict.with_ms:7.1f}{verdict.without_ms:7.1f}{verdict.share_pct:6.0f} %"
        f"{predicted} %  {verdict.place or '-':>4}  {verdict.first[:_TITLE_CHARS] or 'no finding'}"
    )


def misses(verdict: Verdict) -> list[str]:
    """The first findings of a cause that is not among the first three, a line each."""
    return [] if 1 <= verdict.place <= 3 else [f"    {number}. {title}" for number, title in enumerate(verdict.top, 1)]


HEADER = f"{'cause':<24}{'with':>7}{'ms':>7}{'share':>8}{'pred':>6}  {'rank':>4}  first finding"


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts of what was named, and each miss."""
    total = len(verdicts)
    first = sum(verdict.place == 1 for verdict in verdicts)
    three = sum(1 <= verdict.place <= 3 for verdict in verdicts)
    close = sum(verdict.saving_is_right for verdict in verdicts)
    told = [verdict for verdict in verdicts if verdict.should_be_said]
    lines = [
        f"named first: {first} of {total}; among the first three: {three}; "
        f"saving within {TOLERANCE_POINTS:g} points: {close}",
        *(f"  missed: {v.cause.name} ({v.cause.unknowable or 'knowable'})" for v in verdicts if not 1 <= v.place <= 3),
        f"verdict names the cause where the first finding does: {sum(v.is_said for v in told)} of {len(told)}",
        *(f"  not named: {v.cause.name}: {v.sentence}" for v in told if not v.is_said),
        f"controls with a claim above {CLAIM_PCT:g} %: {sum(bool(v.false_claims) for v in verdicts)} of {total}",
        *(f"  {v.cause.program} for {v.cause.name}: {'; '.join(v.false_claims)}" for v in verdicts if v.false_claims),
    ]
    taken = Counter(verdict.first.rsplit(" ", 2)[0] for verdict in verdicts if verdict.place != 1 and verdict.first)
    lines += [f"  taken for: {title} ({number})" for title, number in taken.most_common()]
    return "\n".join(lines)
