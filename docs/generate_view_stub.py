"""Writes view_methods.pyi, by which editors complete views, from the registered views."""

import json
import types
from collections.abc import Sequence
from enum import EnumType
from inspect import Parameter
from pathlib import Path
from textwrap import fill, indent
from typing import Any, Literal, Union, get_args, get_origin

from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.catalog.view_methods import Sources, Views, docstring, signature
from kineto_trace.view_api.option_words import option_words
from kineto_trace.view_api.view import View

PATH = Path(__file__).parents[1] / "daemon/kineto_trace/catalog/view_methods.pyi"
HEAD = f'''"""All views as functions whose arguments are their options.

`make views` makes this file from the code, and a test checks that it is current.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from inspect import Signature
from typing import Literal

from kineto_trace.catalog.view_runner import Paths
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import View

Sources = Paths | Context | Trace | Iterable[Paths]

class Views:
    """{Views.__doc__}"""

    def __call__(self) -> Mapping[str, View]:
        """{Views.__call__.__doc__}"""

'''
TAIL = "def signature(view: View) -> Signature: ...\ndef docstring(view: View) -> str: ...\n\nviews: Views\n"
WIDTH = 112


def kind_text(kind: Any) -> str:
    """The source text of a type."""
    if kind is Sources:
        return "Sources"
    if get_origin(kind) is Literal or isinstance(kind, EnumType):
        return f"Literal[{', '.join(map(value_text, option_words(kind)))}]"
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(map(kind_text, get_args(kind)))
    if get_origin(kind) in (Sequence, tuple):
        return f"{get_origin(kind).__name__}[{', '.join(map(kind_text, get_args(kind)))}]"
    return "None" if kind is type(None) else str(kind.__name__)


def value_text(value: object) -> str:
    """The source text of a value."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def method(view: View) -> str:
    """The method of one view."""
    found = signature(view)
    parts = ["self"]
    for parameter in found.parameters.values():
        parts += ["*"] if parameter.kind is Parameter.KEYWORD_ONLY and "*" not in parts else []
        default = "" if parameter.default is Parameter.empty else f" = {value_text(parameter.default)}"
        parts.append(f"{parameter.name}: {kind_text(parameter.annotation)}{default}")
    head = "\n".join(f"        {part}," for part in parts)
    *rules, columns = docstring(view).replace("\\", "\\\\").split("\n\n")
    text = indent("\n\n".join([*rules, fill(columns, WIDTH)]), " " * 8).lstrip()
    return f'    def {view.name}(\n{head}\n    ) -> Result:\n        """{text}\n        """'


def document() -> str:
    """The whole file."""
    methods = "\n\n".join(method(VIEWS[name]) for name in sorted(VIEWS))
    return f"{HEAD}{methods}\n\n{TAIL}"


if __name__ == "__main__":
    PATH.write_text(document())
