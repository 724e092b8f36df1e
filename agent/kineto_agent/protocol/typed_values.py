"""Converts nested NamedTuples to JSON values and back, by their annotations; the values may be untrusted. No I/O."""

import collections.abc
import re
from typing import Any, Dict, Mapping, Tuple, get_args, get_origin, get_type_hints

MAX_MEMBERS = 1024  # of a list or an object
_INT_LIMIT = 1 << 63
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,19}")


def shown(value: object) -> str:
    """The beginning of a value, for errors."""
    try:
        return repr(value)[:80]
    except (RecursionError, ValueError):  # nested too deeply; an int of thousands of digits
        return "a %s" % type(value).__name__


def plain(value: Any) -> Any:
    """The value in a form for json.dumps, without members that have their default."""
    if hasattr(value, "_field_defaults"):
        members = value._asdict().items()
        defaults = value._field_defaults
        return {key: plain(each) for key, each in members if key not in defaults or each != defaults[key]}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def typed(value: Any, kind: Any, place: str) -> Any:
    """The JSON value as the type of an annotation; a value of that type is returned unchanged. Raises ValueError.

    kind: a NamedTuple, Mapping, Tuple, str, int, float or bool, possibly nested. place: for the error.
    """
    if hasattr(kind, "_field_defaults"):
        return _named(value, kind, place)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is collections.abc.Mapping:
        return _mapping(value, parts, place)
    if origin is tuple:
        return _tuple(value, parts, place)
    if kind is float and type(value) is int:
        return float(value) if abs(value) < _INT_LIMIT else value
    if type(value) is not kind:
        raise ValueError("%s is %s; expected %s" % (place, shown(value), kind.__name__))
    return value


def _named(value: Any, kind: Any, place: str) -> Any:
    members = value._asdict() if isinstance(value, kind) else value
    hints = get_type_hints(kind)
    if not isinstance(members, dict) or not set(members) <= set(hints):
        raise ValueError("%s is %s; expected an object with %s" % (place, shown(value), ", ".join(hints)))
    missing = [name for name in hints if name not in members and name not in kind._field_defaults]
    if missing:
        raise ValueError("%s.%s is missing" % (place, missing[0]))
    return kind(**{key: typed(each, hints[key], "%s.%s" % (place, key)) for key, each in members.items()})


def _mapping(value: Any, parts: Tuple[Any, ...], place: str) -> Dict[Any, Any]:
    if not isinstance(value, Mapping) or len(value) > MAX_MEMBERS:
        raise ValueError("%s is %s; expected an object with at most %d members" % (place, shown(value), MAX_MEMBERS))
    found: Dict[Any, Any] = {}
    for key, each in value.items():
        at = "%s[%s]" % (place, shown(key))
        is_number = parts[0] is int and isinstance(key, str) and _NUMBER.fullmatch(key)
        member = typed(int(key) if is_number else key, parts[0], at)
        found[member] = typed(each, parts[1], at)
    return found


def _tuple(value: Any, parts: Tuple[Any, ...], place: str) -> Tuple[Any, ...]:
    many = len(parts) == 2 and parts[1] is Ellipsis
    if not isinstance(value, (list, tuple)) or (len(value) > MAX_MEMBERS if many else len(value) != len(parts)):
        raise ValueError("%s is %s; expected a list%s" % (place, shown(value), "" if many else " of %d" % len(parts)))
    kinds = parts[:1] * len(value) if many else parts
    return tuple(typed(each, kind, "%s[%d]" % (place, at)) for at, (each, kind) in enumerate(zip(value, kinds)))
