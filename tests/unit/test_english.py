"""Phrases that were replaced by plainer ones do not come back into what users read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPLACED = (
    r"meanwhile",  # during that; until then
    r"all else(?!:\n)",  # everything else
    r"that is to be had",  # that there is
    r"of which it is not known",
    r"is not gained",
    r"\bguess (?:no|yes)\b",
    r"saving %",
    r"tells it\b",  # shows it
    r"was given to the",
    r"(?:does|do) not tell why",  # does not show why
    r"\bas by the\b",  # for example by the
    r"\bmore own work\b",  # more of its own work
    r"\bexclude each other\b",  # cannot be combined
    r"\banswer of the daemon\b",  # the daemon's reply
    r"\bexists already\b",  # already exists
    r"\bsay where to ask\b",
    r"\bknown are\b",
    r"\bevery so many\b",
    r"\btoo few to tell by\b",
    r"\bcompiled anew\b",  # compiled again
    r"\bare not to be had\b",  # are not available
    r"\bcannot be told whether\b",
    r"\bsince before\b",
    r"\bthe own user\b",
)


def texts() -> Iterator[tuple[str, str]]:
    """The documents and pages whole, and the strings of the product without its docstrings."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "cli").rglob("*.html")):
        yield path.name, path.read_text()
    for folder in ("agent", "daemon", "cli"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.name}:{node.lineno}", node.value


def test_what_was_replaced_is_gone() -> None:
    pattern = re.compile("|".join(REPLACED), re.IGNORECASE)
    assert [(place, found[0]) for place, text in texts() for found in pattern.finditer(text)] == []
