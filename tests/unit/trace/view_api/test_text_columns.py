"""Columns of texts by number."""

import numpy as np
import pytest
from kineto_trace.view_api.text_columns import coded_texts, texts


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32])
def test_numbers_of_any_type_have_their_texts(kind: type[np.generic]) -> None:
    assert texts(["a", "b", "c"], np.array([2, 0, 2], kind)).to_pylist() == ["c", "a", "c"]


def test_each_text_is_coded_once_and_negative_numbers_are_missing() -> None:
    coded = coded_texts(["a", "b", "c"], np.array([2, -1, 0, 2, -7], np.int32), "<{}>")
    assert coded.to_pylist() == ["<c>", None, "<a>", "<c>", None]
    assert coded.dictionary.to_pylist() == ["<a>", "<c>"]
