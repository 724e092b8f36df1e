"""The examples of properties are the same in every run and in each of its workers, as tests/conftest.py says."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def examples() -> list[list[int]]:
    seen = []

    @settings(derandomize=True, max_examples=200)
    @given(st.lists(st.integers()))
    def note(values: list[int]) -> None:
        seen.append(values)

    note()
    return seen


def test_examples_do_not_depend_on_what_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = examples()
    path = tmp_path / "numbers_of_a_module.py"
    path.write_text(f"NUMBERS = {[1000 + number for number in range(300)]}\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    assert examples() == before
