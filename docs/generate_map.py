"""Writes the map of folders in docs/architecture.md from the packages' docstrings: `python docs/generate_map.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- {}: made by `python docs/generate_map.py` -->\n", "<!-- end -->\n"
PACKAGES = ("cli/kinetoctl", "daemon/kinetod", "agent/kineto_agent", "daemon/kineto_trace")


def folders(package: str) -> Iterator[tuple[str, str]]:
    """Each folder below the package and the first sentence of its docstring, in the order of names."""
    for path in sorted((ROOT / package).rglob("__init__.py")):
        purpose = ast.get_docstring(ast.parse(path.read_text())) or ""
        yield str(path.parent.relative_to(ROOT)), " ".join(purpose.split("\n\n")[0].split())


def table(package: str) -> str:
    """One row for each folder."""
    rows = [f"| `{folder}/` | {purpose} |" for folder, purpose in folders(package)]
    return "\n".join(["| folder | what it is for |", "|---|---|", *rows]) + "\n"


def with_tables(text: str) -> str:
    """The document with fresh tables."""
    for package in PACKAGES:
        head, begin, rest = text.partition(BEGIN.format(package))
        _, end, tail = rest.partition(END)
        text = f"{head}{begin}{table(package)}{end}{tail}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
