"""The results for people: a Markdown table, one compact line a program, and what failed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from gpu.zoo.figures import Memory, Row

MOST_CHARACTERS = 12_000  # of what is printed last
SHORT = {"unharmed": "ok", "HARMED": "HARMED", "skipped": "skip", "not run": "not run"}


def number(value: float, form: str) -> str:
    """Nothing where nothing is known."""
    return format(value, form) if value else "-"


def mib(memory: Mapping[str, Memory], part: str) -> str:
    """Before the first capture, after it, at the end; in MiB."""
    points = [getattr(memory[point], part) >> 20 for point in ("before", "first", "end") if point in memory]
    return "/".join(map(str, points)) if any(points) else "-"


def counted(counts: Mapping[str, int]) -> str:
    """The most frequent first."""
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))


def middle(values: Sequence[float]) -> float:
    """The median; 0: there is none."""
    return statistics.median(values) if values else 0.0


def gaps(traced_ms: float, untouched_ms: float) -> str:
    """The longest gap in ms, the untouched program's in brackets."""
    return f"{number(traced_ms, '.1f')} ({number(untouched_ms, '.1f')})" if traced_ms else "-"


def cells(row: Row) -> list[str]:
    """One row of the table."""
    return [
        row.name,
        SHORT[row.state],
        counted(row.verdicts) or "-",
        number(row.compared, "d"),
        number(middle(row.kernels), ".0f"),
        number(row.before_ms, ".3f"),
        number(row.during_ms / row.before_ms if row.before_ms else 0, ".2f"),
        number(row.ratio, ".3f"),
        number(row.twin_ratio, ".3f"),
        number(row.after_ms / row.untouched_ms if row.untouched_ms else 0, ".3f"),
        gaps(row.gap_during_ms, row.twin_gap_during_ms),
        gaps(row.gap_after_ms, row.twin_gap_after_ms),
        number(row.lost, "d"),
        mib(row.memory, "rss"),
        mib(row.memory, "gpu"),
        number(row.first_record_s[0] if row.first_record_s else 0, ".2f"),
        number(middle(row.first_record_s), ".2f"),
    ]


HEAD = (
    "program", "state", "verdicts", "digests", "kernels", "ms", "during", "after", "twin", "after/untouched",
    "gap during", "gap after", "lost", "RSS MiB", "GPU MiB", "1st s", "med s",
)  # fmt: skip


def markdown(rows: Sequence[Row], summary: str) -> str:
    """The whole table, then what harmed, what was told and who was left out."""
    lines = [summary, "", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    for title, wanted in (("Harmed", "HARMED"), ("Not run", "not run"), ("Skipped", "skipped")):
        chosen = [row for row in rows if row.state == wanted]
        lines += ["", f"## {title}: {len(chosen)}"] if chosen else []
        lines += [f"* {row.name}: {'; '.join(row.problems + row.notes)}" for row in chosen]
    lines += ["", "## Told by the captures"]
    for what, counts in (("warning", merged(rows, "warnings")), ("reason", merged(rows, "reasons"))):
        lines += [f"* {count} times, {what}: {text}" for text, count in counts.most_common()]
    lines += ["", "## Notes"]
    lines += [
        f"* {row.name}: {'; '.join(row.notes)}" for row in rows if row.notes and row.state in ("unharmed", "HARMED")
    ]
    return "\n".join(lines) + "\n"


def merged(rows: Sequence[Row], name: str) -> Counter[str]:
    """Over all programs."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(getattr(row, name))
    return total


def summary_of(rows: Sequence[Row]) -> str:
    """One line."""
    states = Counter(row.state for row in rows)
    captures = sum(row.captures for row in rows)
    told = ", ".join(f"{states[state]} {state}" for state in ("unharmed", "HARMED", "skipped", "not run"))
    return f"{len(rows)} programs, {captures} captures: {told}"


LINE_HEAD = (
    f"{'program':<29}{'state':<8}{'caps':>4}{'done':>5}{'digs':>5}{'kern':>7}{'ms':>9}{'during':>7}{'after':>7}"
    f"{'twin':>7}{'gap ms':>8}{'(twin)':>8}{'after':>8}{'(twin)':>8}{'1st s':>6}{'RSS+':>5}{'GPU+':>5} told"
)


def compact(rows: Sequence[Row]) -> str:
    """What is printed last: one line a program, then what failed, in as many characters as are read."""
    failed = [row for row in rows if row.state in ("HARMED", "not run")]
    lines = [LINE_HEAD, *(line(row) for row in rows), summary_of(rows)]
    lines += [f"{row.state} {row.name}: {'; '.join(row.problems + row.notes)[:300]}" for row in failed]
    for title, counts in (("warning", merged(rows, "warnings")), ("reason", merged(rows, "reasons"))):
        lines += [f"{title} {count}x: {text[:160]}" for text, count in counts.most_common(6)]
    text = "\n".join(lines)[: MOST_CHARACTERS - 200]
    room = (MOST_CHARACTERS - len(text) - 200) // max(1, len(failed))
    for row in failed:
        if row.stderr and room > 80:
            text += f"\n--- {row.name}: stderr\n{row.stderr.strip()[-(room - 60) :]}"
    return text


def line(row: Row) -> str:
    """One program."""
    if row.state == "skipped":
        return f"{row.name:<29}{'skip':<8}{'; '.join(row.notes)[:90]}"
    done = row.verdicts.get("DONE", 0)
    during = row.during_ms / row.before_ms if row.before_ms else 0.0
    first = row.first_record_s[0] if row.first_record_s else 0.0
    grown = "".join(f"{grown_mib(row.memory, part):>5}" for part in ("rss", "gpu"))
    return (
        f"{row.name:<29}{SHORT[row.state]:<8}{row.captures:>4}{done:>5}{row.compared:>5}{middle(row.kernels):>7.0f}"
        f"{row.before_ms:>9.3f}{during:>7.2f}{row.ratio:>7.3f}{row.twin_ratio:>7.3f}"
        f"{row.gap_during_ms:>8.1f}{row.twin_gap_during_ms:>8.1f}{row.gap_after_ms:>8.1f}{row.twin_gap_after_ms:>8.1f}"
        f"{first:>6.2f}"
        f"{grown} {len(row.warnings) or ''}"
    )


def grown_mib(memory: Mapping[str, Memory], part: str) -> str:
    """From before the first capture to the end."""
    if not {"before", "end"} <= memory.keys():
        return "-"
    return str((getattr(memory["end"], part) - getattr(memory["before"], part)) >> 20)
