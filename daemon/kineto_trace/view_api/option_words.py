"""Options of views that accept one of a few words: the words are in the option's type, a Literal or an Enum."""

import types
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin


def option_words(kind: Any) -> dict[str, Any]:
    """Returns the words that a type accepts, with the value of each; empty for types that also accept other values."""
    if get_origin(kind) is Literal:
        return {str(value): value for value in get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {str(member.value): member for member in kind}
    if get_origin(kind) in (Union, types.UnionType):
        parts = [option_words(part) for part in get_args(kind) if part is not type(None)]
        return {} if not all(parts) else {word: value for part in parts for word, value in part.items()}
    return {}


def accepts(kind: Any, value: Any) -> bool:
    """Returns whether an option of this type, if it only accepts words, accepts the value."""
    words = option_words(kind)
    missing = value is None and type(None) in get_args(kind)
    return not words or missing or (isinstance(value, str) and value in words)
