"""Plain values as JSON or YAML on stdout."""

import json
from typing import Any

from kineto_protos.plain import plain as plain
from kineto_trace.base.visible_text import in_json, visible

from kinetoctl.output.console import say_text


def emit(value: Any, output: str) -> None:
    """Print a JSON value on stdout, as YAML if output is "yaml", else as JSON."""
    if output == "yaml":
        say_text(as_yaml(value), nl=False)
    else:
        say_text(as_json(value, indent=2))


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON text without characters that could steer a terminal."""
    return in_json(json.dumps(value, indent=indent, ensure_ascii=False))


def as_yaml(value: Any) -> str:
    """YAML text without such characters: if there are any, everything that is not ASCII is escaped."""
    import yaml  # 10 ms that no other form needs

    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    if visible(text) == text:
        return text
    escaped: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=False)
    return escaped
