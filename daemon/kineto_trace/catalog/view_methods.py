"""All views as functions whose arguments are their options: `kineto_trace.views.kernels(trace)`.

Theory of operation
    Editors and type checkers read view_methods.pyi, which `make views` writes from the registered views, instead of
    this module. At run time a function is made on first use; its signature and docstring provide the same to help() and
    to notebooks.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from inspect import Parameter, Signature
from typing import Any, Literal

from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.catalog.view_runner import Paths, run_view
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import Compat, View

Sources = Paths | Context | Trace | Iterable[Paths]


class Views:
    """All analyses: `views.NAME(sources, option=value, …)` runs one, `views()` returns all of them by name.

    sources, executor and the errors of each function are those of run_view().
    """

    def __call__(self) -> Mapping[str, View]:
        """Returns all analyses by name, sorted by name."""
        return dict(sorted(VIEWS.items()))

    def __getattr__(self, name: str) -> Callable[..., Result]:
        if name not in VIEWS:
            raise AttributeError(f"no view is called {name!r}; kineto_trace.views() returns all of them")
        return _function(VIEWS[name])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *VIEWS})

    def __repr__(self) -> str:
        return f"<Views: {', '.join(sorted(VIEWS))}>"


def signature(view: View) -> Signature:
    """Returns the arguments of the function for a view."""
    options = {name: (view.option_type(name), default) for name, default in view.options.items()}
    if view.compat:
        tools = (Compat.NONE.value, *sorted(tool.value for tool in view.compat))
        options["compat"] = (Literal[tools], Compat.NONE.value)
    options["executor"] = (Executor | None, None)
    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]
    sources = Parameter("sources", Parameter.POSITIONAL_OR_KEYWORD, annotation=Sources)
    return Signature([sources, *keywords], return_annotation=Result)


def docstring(view: View) -> str:
    """Returns the docstring of the function for a view: its description and the names of its columns."""
    return f"{view.description}\n\nColumns: {', '.join(column.name for column in view.result_columns)}."


def _function(view: View) -> Callable[..., Result]:
    def run(sources: Sources, **options: Any) -> Result:
        return run_view(view.name, sources, **options)

    run.__name__ = run.__qualname__ = view.name
    run.__doc__ = docstring(view)
    run.__signature__ = signature(view)  # type: ignore[attr-defined]  # inspect looks for it
    return run


views = Views()
