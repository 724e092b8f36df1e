"""What reason codes mean and what to do about them: the tables of docs/errors.md, which comes with the package."""

import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from kinetoctl.errors import CliError, NotFound, UsageProblem

_PLACES = (Path(__file__).parent / "data" / "errors.md", Path(__file__).parents[3] / "docs" / "errors.md")
_CODE = re.compile(r"`([A-Z][A-Z0-9_]+…?)`")
_VERDICTS = "Verdicts"  # how the headings of codes that end a trace begin
_LINK = re.compile(r"\[([^]]+)]\([^)]+\)")


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row of the document. where: what gives this code; status: the gRPC status or the verdicts it comes with."""

    code: str
    where: str
    status: str
    meaning: str
    remedy: str

    def plain(self) -> dict[str, str]:
        """The row as values for JSON."""
        return asdict(self)


def explanations() -> list[Explanation]:
    """All rows in the order of the document; a code that comes from several places has several.

    None if the document was removed from the installation.
    """
    place = next((place for place in _PLACES if place.is_file()), None)
    return list(_rows(place)) if place else []


@cache
def _rows(place: Path) -> tuple[Explanation, ...]:
    """The rows of the tables, read once: a result of many processes asks for each of them."""
    found: list[Explanation] = []
    heading = ""
    columns: list[str] = []
    for line in place.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not columns:
            columns = cells
        elif (codes := _CODE.findall(cells[0])) and len(cells) >= len(columns) - 1:
            row = dict(zip(columns, [*cells, ""], strict=False))
            status = row.get("gRPC status", row.get("Verdict", ""))
            meaning, remedy = (_plain(row[name]) for name in ("What it means", "What to do"))
            found += [Explanation(code, heading, status, meaning, remedy) for code in codes]
    return tuple(found)


def explained(code: str) -> list[Explanation]:
    """The rows of one code, in upper or lower case. Raises UsageProblem, which names codes that are like it."""
    rows = explanations()
    if not rows:
        raise NotFound(f"{_PLACES[0]} is missing: reinstall kinetod")
    wanted = code.strip().strip("[]`").upper().replace("-", "_")
    found = [row for row in rows if row.code == wanted]
    if found:
        return found
    import difflib

    like = difflib.get_close_matches(wanted, {row.code for row in rows}, 3)
    guess = f"; did you mean {' or '.join(like)}?" if like else ""
    raise UsageProblem(f"there is no reason code {code!r:.80}{guess or '; `kinetoctl explain` lists them all'}")


def is_explained(code: str) -> bool:
    """Whether the document says what to do about this code."""
    return any(row.code == code and row.remedy for row in explanations()) if code else False


def remedy(code: str) -> str:
    """What to do about a process whose verdict has this code; "" if the document does not say."""
    rows = sorted(explanations(), key=lambda row: not row.where.startswith(_VERDICTS))  # a refused call has others
    return next((row.remedy for row in rows if row.code == code), "")


def advices(error: CliError) -> list[str]:
    """What to print below an error: what to do, or which command says that."""
    explain = [f"Run `kinetoctl explain {error.reason_code}` for advice."] if is_explained(error.reason_code) else []
    return [*explain, *([error.help_text] if error.help_text else [])]


def _plain(text: str) -> str:
    """The text without links."""
    return _LINK.sub(r"\1", text).removesuffix("|").strip()
