"""Writes the table of flags in docs/dynolog.md from the code: `python docs/generate_dynolog.py`."""

from pathlib import Path

from kinetoctl.dynolog_migration import OWN_FLAGS, DynologFlag

DOCUMENT = Path(__file__).with_name("dynolog.md")
BEGIN, END = "<!-- flags: made by `python docs/generate_dynolog.py` -->\n", "<!-- end -->\n"


def row(flag: DynologFlag) -> str:
    """One flag, with its default, what becomes of it and why."""
    keys = ", ".join(f"`{key}`" for key in flag.keys)
    default = f"`{flag.default}`" if flag.default else ""
    return f"| `--{flag.name}` | {default} | {flag.outcome.value} | {keys} | {flag.note} |\n"


def with_table(text: str) -> str:
    """The document with a fresh table."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    rows = "".join(row(OWN_FLAGS[name]) for name in sorted(OWN_FLAGS, key=str.lower))
    return f"{head}{begin}| flag | default | becomes | setting | note |\n|---|---|---|---|---|\n{rows}{end}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
