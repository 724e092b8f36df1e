"""Options of views that take one of a few words."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

import pytest
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.errors import ViewError
from kineto_trace.view_api.option_words import accepts, option_words
from kineto_trace.view_api.view import Compat

Word = Literal["host", "gpu"]


class Side(StrEnum):
    LEFT = "left"
    RIGHT = "right"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Word, ["host", "gpu"]),
        (Word | None, ["host", "gpu"]),
        (Side, ["left", "right"]),
        (str, []),
        (bool, []),
        (int | Word, []),
        (Sequence[str], []),
    ],
)
def test_the_words_of_a_type_are_those_that_it_lists(kind: Any, words: list[str]) -> None:
    assert list(option_words(kind)) == words


def test_an_option_takes_its_words_and_none_only_where_its_type_has_it() -> None:
    assert accepts(Word, "gpu") and accepts(Side, Side.LEFT) and accepts(Side, "left") and accepts(str, "anything")
    assert not accepts(Word, "GPU") and not accepts(Word, ["gpu"])
    assert (accepts(Word | None, None), accepts(Word, None)) == (True, False)


@pytest.mark.parametrize("compat", [Compat.NONE, Compat.PLUGIN])
def test_a_word_that_an_option_does_not_take_is_refused_with_those_it_takes(compat: Compat) -> None:
    with pytest.raises(ViewError, match="view operators: group_by='shape' is not valid; use one of name, name"):
        VIEWS["operators"].check(compat, {"group_by": "shape"})


def test_the_default_of_every_option_is_one_of_its_words() -> None:
    options = [(view.option_type(name), value) for view in VIEWS.values() for name, value in view.options.items()]
    assert [(kind, value) for kind, value in options if not accepts(kind, value)] == []
