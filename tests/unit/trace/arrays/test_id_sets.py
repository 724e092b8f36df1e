import ast
from pathlib import Path
from typing import Any

import kineto_trace
import numpy as np
import numpy.typing as npt
import pytest
from kineto_trace.arrays.id_sets import distinct, is_in, lookup, unique_values


def test_distinct_values_in_order_of_appearance() -> None:
    assert distinct(np.array([7, 3, 7, 0, 3], np.uint32)).tolist() == [7, 3, 0]
    assert distinct(np.array([], np.uint32)).tolist() == []


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.uint8, np.bool_, np.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (500,), (20, 30)])
def test_unique_values_agree_with_numpys(kind: type, shape: tuple[int, ...]) -> None:
    values: npt.NDArray[Any] = np.random.default_rng(1).integers(0, 200, shape).astype(kind)
    found = unique_values(values)
    assert found.dtype == kind
    assert (found == np.unique(values)).all()
    assert len(found) == len(np.unique(values))


def test_the_library_has_no_use_of_numpys_unique_values_alone() -> None:
    for path in Path(kineto_trace.__file__).parent.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call)]
        alone = [call.lineno for call in calls if ast.unparse(call.func) == "np.unique" and not call.keywords]
        assert not alone, f"{path}, lines {alone}: use unique_values, which does not make a hash table"


def test_membership_agrees_with_numpys() -> None:
    random = np.random.default_rng(1)
    for high in (50, 2**32 - 1):
        values = random.integers(10, high, 1000).astype(np.uint32)
        wanted = np.concatenate([random.integers(0, high, 1000).astype(np.uint32), values[:10]])
        assert (is_in(wanted, values) == np.isin(wanted, values)).all()


def test_nothing_is_in_nothing() -> None:
    some, none = np.array([0, 2**32 - 1], np.uint32), np.array([], np.uint32)
    assert is_in(some, none).tolist() == [False, False]
    assert is_in(none, some).tolist() == []


@pytest.mark.parametrize("spread", [1, 1 << 24])
def test_values_are_found_by_key(spread: int) -> None:
    keys = np.array([5, 9, 7, 9], np.uint32) * np.uint32(spread)
    wanted = np.array([9, 4, 5, 200, 7, 0], np.uint32) * np.uint32(spread)
    assert lookup(wanted, keys, np.array([50, 90, 70, 91]), -1).tolist() == [91, -1, 50, -1, 70, -1]


def test_values_of_no_keys_are_the_default() -> None:
    assert lookup(np.array([1], np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64), 3).tolist() == [3]
    assert lookup(np.empty(0, np.uint64), np.array([1], np.uint64), np.array([1]), 3).tolist() == []
