"""What a reason code means and what to do, as lines for people. Pure."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetoctl.base.reason_codes import Explanation

WIDTH = 100
Line = tuple[str, bool]  # the text, and whether it is a title


def explanation_lines(rows: "Sequence[Explanation]") -> Iterator[Line]:
    """The rows of one code, with a blank line between two."""
    for place, row in enumerate(rows):
        status = f" ({row.status})" if row.status else ""
        if place:
            yield "", False
        yield f"{row.code}{status}: {row.where.lower()}", True
        yield _paragraph(row.meaning), False
        if row.remedy:
            yield _paragraph(f"What to do: {row.remedy}"), False


def _paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
