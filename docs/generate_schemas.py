"""Writes the reference at the end of docs/record-schemas.md from the code: `python docs/generate_schemas.py`."""

from collections.abc import Iterable
from pathlib import Path

from kineto_agent.protocol import schema
from kineto_trace.model.trace import SCHEMAS

DOCUMENT = Path(__file__).with_name("record-schemas.md")
BEGIN, END = "<!-- made by `python docs/generate_schemas.py` -->\n", "<!-- end -->\n"
_CODES = {
    "b": "signed, 8 bits", "B": "unsigned, 8 bits", "h": "signed, 16 bits", "H": "unsigned, 16 bits",
    "i": "signed, 32 bits", "I": "unsigned, 32 bits", "q": "signed, 64 bits", "Q": "unsigned, 64 bits",
    "f": "floating point, 32 bits", "d": "floating point, 64 bits",
}  # fmt: skip


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def _kineto_types() -> str:
    rows = []
    for kind, (roles, columns) in schema.TYPES_OF_KINETO.items():
        meanings = {column.name: column.meaning for column in SCHEMAS[kind]}
        told = "; ".join(f"`{name}` {meanings[name]}".replace("|", "\\|") for name in columns)
        rows.append((f"`{kind}`", ", ".join(roles) or "-", told))
    return _table(("type", "roles", "columns"), rows)


def _types() -> str:
    columns = _table(("type of a column", "filled by fields with the codes"), (
        (f"`{name}`", {"text": "an integer with `texts`, or bytes", "f64": "any number"}.get(name, "an integer"))
        for name in schema.DTYPES
    ))  # fmt: skip
    codes = _table(("code of a field", "value"), (
        *((f"`{code}`", _CODES[code]) for code in "bBhHiIqQfd" if schema.width(code)),
        (f"`1s` to `{schema.MAX_BYTES_FIELD}s`", "bytes of text, up to a NUL"),
    ))  # fmt: skip
    return f"{columns}\nFields are little-endian.\n\n{codes}"


def _limits() -> str:
    limits = (
        ("activity types", schema.MAX_TYPES), ("kinds of records", schema.MAX_RECORDS),
        ("fields of a record", schema.MAX_FIELDS), ("columns of a type", schema.MAX_COLUMNS),
        ("bytes of a record", schema.MAX_RECORD_BYTES), ("values of an enumeration", schema.MAX_VALUES),
        ("characters of a text", schema.MAX_TEXT), ("bytes of the schema as JSON", schema.MAX_JSON_BYTES),
    )  # fmt: skip
    return _table(("at most", "of"), ((f"{most:,}", what) for what, most in limits))


def reference() -> str:
    """All of it."""
    reserved = ", ".join(f"`{name}`" for name in sorted(schema.RESERVED_NAMES))
    return (
        f"### Kineto's types\n\n{_kineto_types()}\n### Types of columns and fields\n\n{_types()}\n"
        f"### Limits\n\n{_limits()}\nNames that no schema may have: {reserved}.\n"
    )


def with_reference(text: str) -> str:
    """The document with a fresh reference."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}\n{reference()}\n{end}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_reference(DOCUMENT.read_text()))
