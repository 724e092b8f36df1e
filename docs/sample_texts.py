"""Prints a random sample of the product's texts, for a reader to judge: `python docs/sample_texts.py 100 --seed 7`.

Texts are the strings of four words or more, and the docstrings of commands and views, which are their descriptions.
"""

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRODUCT = ("cli/kinetoctl", "daemon/kineto_trace", "daemon/kinetod", "agent/kineto_agent", "protos/kineto_protos")
LEAST_WORDS = 4
_PROSE = re.compile(r"[a-z]+ [a-z]+")
_SQL = re.compile(r"\b(SELECT|UPDATE|INSERT|CREATE TABLE)\b")
_DESCRIBED = re.compile(r"\b(view|command|group)\b")  # decorators whose functions have a docstring for users


class Text(NamedTuple):
    """One text. path: below the root."""

    path: str
    line: int
    text: str


def product_texts() -> Iterator[Text]:
    """Yields all texts. Inserted values are {…}."""
    for room in PRODUCT:
        for path in sorted((ROOT / room).rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                yield from _texts(path)


def _texts(path: Path) -> Iterator[Text]:
    tree = ast.parse(path.read_text())
    skipped = {id(part) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for part in ast.walk(each)}
    skipped -= {id(each) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr)}
    skipped |= {id(docstring) for docstring in _internal_docstrings(tree)}
    for each in ast.walk(tree):
        if id(each) in skipped or not isinstance(each, (ast.Constant, ast.JoinedStr)):
            continue
        text = " ".join(_content(each).split())
        if len(text.split()) >= LEAST_WORDS and _PROSE.search(text) and not _SQL.search(text):
            yield Text(str(path.relative_to(ROOT)), each.lineno, text)


def _internal_docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for each in ast.walk(tree):
        if isinstance(each, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and each.body:
            first = each.body[0]
            decorators = [] if isinstance(each, ast.Module) else each.decorator_list
            described = any(_DESCRIBED.search(ast.unparse(decorator)) for decorator in decorators)
            if isinstance(first, ast.Expr) and not described:
                yield first.value


def _content(each: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(each, ast.Constant):
        return each.value if isinstance(each.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in each.values)


def main() -> None:
    """Prints the sample."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = random.Random(options.seed).sample(list(product_texts()), options.count)  # noqa: S311 - no secret
    for each in chosen:
        sys.stdout.write(f"{each.path}:{each.line}: {each.text}\n")


if __name__ == "__main__":
    main()
