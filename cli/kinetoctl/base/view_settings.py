"""Options of views on the command line: name=value, typed by the view's own signature."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from kineto_trace.view_api.option_words import option_words

from kinetoctl.errors import WrongAnalysis

if TYPE_CHECKING:
    from kineto_trace.view_api.view import View

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_NONE = ("none", "null", "")
# What traces can be compared by: the names that users type, and the views that they stand for.
DIFF_VIEWS = {  # compared per step
    "steps": "diff_step_times",
    "ops": "diff_operators",
    "kernels": "diff_kernel_names",
    "modules": "diff_modules",
    "paths": "diff_call_paths",
    "python": "diff_python_functions",
}
TREE = "tree"
TREE_VIEWS = {TREE: "diff_tree", "ops": "diff_tree_operators"}  # of one node, as sums over all steps
COUNTERPARTS = {  # views of one trace: those that compare the same in two, step by step
    "step_breakdown": "diff_step_times",
    "operators": "diff_operators",
    "kernels": "diff_kernel_names",
    "modules": "diff_modules",
    "call_tree": "diff_call_paths",
    "python_samples": "diff_python_functions",
}
COMPARED_FIRST = ("step_breakdown", "time_causes")  # on the page of a capture, with a baseline


def parse_setting(text: str) -> tuple[str, str]:
    """Name and value of a text like limit=10. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise ValueError(f"expected a view option like limit=10, got {text!r}")
    return name.strip().replace("-", "_"), value


def options_of(views: Sequence["View"], settings: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """For each view (by name) its options as they were set.

    `name=value` is for every view that has the option, `view.name=value` for one. Raises WrongAnalysis for an option
    that none of them has, or a value that does not fit.
    """
    chosen: dict[str, dict[str, Any]] = {view.name: {} for view in views}
    for key, text in settings:
        only, separator, name = key.rpartition(".")
        owners = [view for view in views if name in view.options and (not separator or view.name == only)]
        if not owners:
            known = ", ".join(f"{view.name}.{option}" for view in views for option in view.options) or "none"
            raise WrongAnalysis(f"none of the requested views has the option {key}; their options are: {known}")
        for view in owners:
            chosen[view.name][name] = typed(view, name, text)
    return chosen


def typed(view: "View", name: str, text: str) -> Any:
    """The value of an option from its text. Raises WrongAnalysis."""
    kind = view.option_type(name)
    try:
        return _parsed(kind, text)
    except ValueError as exc:
        raise WrongAnalysis(f"{view.name}.{name}: expected {type_text(kind)}, got {text!r}") from exc


def type_text(kind: Any) -> str:
    """For people: a whole number, a number, yes or no, text, one of …, several (separated by commas)."""
    plain = {int: "a whole number", float: "a number", bool: "yes or no", str: "text"}
    if kind in plain:
        return plain[kind]
    words = option_words(kind)
    if words:
        return "one of " + ", ".join(words) + (", or none" if type(None) in get_args(kind) else "")
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("none" if part is type(None) else type_text(part) for part in get_args(kind))
    if _is_list(kind):
        inner = next(iter(get_args(kind)), str)
        return f"{type_text(inner)}, or several separated by commas"
    return "text"


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, set, frozenset, Sequence) or kind in (list, tuple, Sequence)


def _parsed(kind: Any, text: str) -> Any:
    """Raises ValueError."""
    parsers: Mapping[Any, Callable[[str], Any]] = {int: int, float: float, str: str, bool: _yes_or_no}
    if kind in parsers:
        return parsers[kind](text)
    if get_origin(kind) in (Union, types.UnionType):
        return _one_of(get_args(kind), text)
    words = option_words(kind)
    if words:
        if text not in words:
            raise ValueError(text)
        return words[text]
    if _is_list(kind):
        inner = next((part for part in get_args(kind) if part is not Ellipsis), str)
        return [_parsed(inner, part.strip()) for part in text.split(",") if part.strip()]
    return text


def _one_of(kinds: Sequence[Any], text: str) -> Any:
    if type(None) in kinds and text.lower() in _NONE:
        return None
    for kind in sorted((kind for kind in kinds if kind is not type(None)), key=lambda kind: kind is str):
        try:
            return _parsed(kind, text)
        except ValueError:
            continue
    raise ValueError(text)


def _yes_or_no(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE
