"""Options of views on the command line."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

import pytest
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, View
from kinetoctl.base.view_settings import options_of, parse_setting, type_text, typed
from kinetoctl.errors import WrongAnalysis


class Side(StrEnum):
    HOST = "host"
    GPU = "gpu"


def _function(
    context: Context,
    *,
    top: int = 10,
    cutoff: float = 50,
    by_shape: bool = False,
    op: str = "",
    step: int | None = None,
    streams: Sequence[int] = (),
    device: Literal["CPU", "GPU"] = "GPU",
    side: Side = Side.HOST,
    cause: Literal["host", "queue"] | None = None,
) -> Answer:
    """Nothing."""
    return Answer({"x": []})


VIEW = View("example", _function, columns(("x", "int", "", "x")), None)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("top", "20", 20),
        ("cutoff", "1.5", 1.5),
        ("cutoff", "2", 2.0),
        ("by_shape", "yes", True),
        ("by_shape", "false", False),
        ("op", "aten::mm", "aten::mm"),
        ("step", "3", 3),
        ("step", "none", None),
        ("streams", "7,13", [7, 13]),
        ("streams", "", []),
        ("device", "CPU", "CPU"),
        ("side", "gpu", Side.GPU),
        ("cause", "queue", "queue"),
        ("cause", "none", None),
    ],
)
def test_values_have_the_types_of_the_signature(name: str, text: str, value: Any) -> None:
    found = typed(VIEW, name, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("top", "many", "example.top: expected a whole number, got 'many'"),
        ("by_shape", "perhaps", "example.by_shape: expected yes or no, got 'perhaps'"),
        ("device", "TPU", "example.device: expected one of CPU, GPU, got 'TPU'"),
        ("cause", "tea", "example.cause: expected one of host, queue, or none, got 'tea'"),
        ("streams", "a", "example.streams: expected a whole number, or several separated by commas, got 'a'"),
        ("step", "x", "example.step: expected a whole number or none, got 'x'"),
    ],
)
def test_a_value_that_does_not_fit_says_what_was_expected(name: str, text: str, message: str) -> None:
    with pytest.raises(WrongAnalysis) as caught:
        typed(VIEW, name, text)
    assert str(caught.value) == message


def test_an_option_goes_to_every_view_that_has_it_or_to_the_one_that_is_named() -> None:
    other = View("other", lambda context, *, top=5: Answer({}), (), None)
    assert options_of([VIEW, other], [("top", "3")]) == {"example": {"top": 3}, "other": {"top": 3}}
    assert options_of([VIEW, other], [("other.top", "4")]) == {"example": {}, "other": {"top": 4}}


def test_an_option_that_no_view_has_is_answered_with_those_there_are() -> None:
    with pytest.raises(WrongAnalysis, match=r"none of .* has the option depth; their options are: example.top, "):
        options_of([VIEW], [("depth", "3")])


def test_settings_are_name_and_value() -> None:
    assert parse_setting("by-shape=a=b") == ("by_shape", "a=b")
    with pytest.raises(ValueError, match="expected a view option like limit=10, got 'top'"):
        parse_setting("top")


def test_types_are_told_in_words() -> None:
    assert type_text(VIEW.option_type("side")) == "one of host, gpu"
    assert type_text(VIEW.option_type("cutoff")) == "a number"
