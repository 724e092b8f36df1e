"""The threat model is true as far as a test can tell: each proof that it names exists, and each attacker has some."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = (ROOT / "docs/threat-model.md").read_text()
ATTACKERS = (
    "Another user of the host", "A front end that was taken over", "A hostile target", "A hostile trace file",
    "A hostile peer host", "The network",
)  # fmt: skip
_PROOF = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def _names_in(path: str) -> frozenset[str]:
    """The functions of a file that are tests."""
    file = ROOT / path
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def section(title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", MODEL, re.MULTILINE | re.DOTALL)
    assert match, f"no section {title!r}"
    return match[1]


def promises(title: str) -> list[tuple[str, str]]:
    """Promise and proof of each row."""
    rows = [line.strip("|").split(" | ") for line in section(title).splitlines() if line.startswith("| ")]
    return [(row[0].strip(), row[-1]) for row in rows if row[0].strip() != "promise"]


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_each_promise_names_its_proof_and_each_proof_is_a_test(attacker: str) -> None:
    rows = promises(attacker)
    assert len(rows) >= 4
    for promise, proof in rows:
        named = _PROOF.findall(proof)
        assert named, promise
        for path, name in named:
            assert name.startswith("test_") and name in _names_in(path), f"{promise}: {path}::{name}"


def test_nothing_else_looks_like_a_proof_and_is_none() -> None:
    for path, name in _PROOF.findall(MODEL):
        assert name in _names_in(path), f"{path}::{name}"
    assert MODEL.count("tests/") == len(_PROOF.findall(MODEL))


def test_the_security_policy_and_the_threat_model_name_each_other() -> None:
    assert "docs/threat-model.md" in (ROOT / "SECURITY.md").read_text()
    assert "(../SECURITY.md)" in MODEL
    assert "SECURITY.md" in (ROOT / "README.md").read_text()
