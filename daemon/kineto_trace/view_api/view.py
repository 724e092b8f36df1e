"""Views: analyses with a name, a description and columns with units, for Python, `kinetoctl report` and SQL.

Theory of operation
    A view is a function with the decorator @view. For one trace it computes its columns; for several traces the results
    of the ranks are concatenated, with the rank in front. A view over all ranks of a job has a second function,
    `reduce`: the first one then computes its input from each trace, any small value that can be pickled (it may come
    from another process or host), so that memory is bounded by one rank's trace.

    Options are keyword arguments with defaults. One that accepts a few words has a Literal or an Enum as its type
    (option_words), which checks and lists them. The figures are exact by default. With `compat` a view reproduces those
    of the TensorBoard profiler plug-in or of HTA where they differ. The functions that do so register themselves with
    `View.variant` (compat).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
import pyarrow as pa

from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.trace_forms import with_current_forms
from kineto_trace.view_api.option_words import accepts, option_words
from kineto_trace.view_api.result import Result, ResultColumn, columns, make_result, make_table, view_html

_PACKED = ""  # no column has this name
_NOTHING = "the trace has no data for this view"
RANK = columns(("rank", "int", "", "rank of the process in its job"))
Function = TypeVar("Function", bound=Callable[..., Any])


class Compat(StrEnum):
    """The tool whose figures a view reproduces."""

    NONE = "none"
    PLUGIN = "plugin"  # the TensorBoard profiler plug-in (torch-tb-profiler)
    HTA = "hta"  # Holistic Trace Analysis (traceinsight)


class Answer(NamedTuple):
    """The columns of a view (arrays or lists), and notes for the reader."""

    values: Mapping[str, Any]
    notes: Sequence[str] = ()


Reduce = Callable[..., Answer]  # arguments: [(rank, partial), …] in the order of ranks, and its options


class Variant(NamedTuple):
    """The functions that reproduce another tool's figures of a view."""

    function: Callable[..., Any]
    reduce: Reduce | None


@dataclass(frozen=True)
class View:
    """One registered analysis.

    reduce: None if it evaluates each trace alone.
    nothing: the note on a result without rows and other notes.
    """

    name: str
    function: Callable[..., Any]
    columns: tuple[ResultColumn, ...]
    reduce: Reduce | None
    nothing: str = _NOTHING
    variants: dict[Compat, Variant] = field(default_factory=dict)

    def variant(self, compat: Compat, *, reduce: Reduce | None = None) -> Callable[[Function], Function]:
        """Registers the decorated function as the view's implementation for this compat.

        Its options are a subset of the view's, and its docstring becomes part of the view's description. reduce: None
        for the view's own.
        """

        def register(function: Function) -> Function:
            self.variants[compat] = Variant(function, reduce or self.reduce)
            return function

        return register

    @property
    def compat(self) -> frozenset[Compat]:
        """Returns the tools whose figures the view can reproduce."""
        return frozenset(self.variants)

    @property
    def description(self) -> str:
        """Returns what the view computes, and its rules."""
        functions = (self.function, *(variant.function for variant in self.variants.values()))
        return "\n\n".join(inspect.getdoc(function) or "" for function in functions)

    @property
    def options(self) -> Mapping[str, Any]:
        """Returns the options of the view and their defaults."""
        functions = [self.function] + ([self.reduce] if self.reduce else [])
        return {
            name: parameter.default
            for function in functions
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }

    def option_type(self, name: str, compat: Compat = Compat.NONE) -> Any:
        """Returns the type of an option, from the signature of the view's function. Raises KeyError."""
        for function in filter(None, (*self._functions(compat), self.function, self.reduce)):
            if name in inspect.signature(function).parameters:
                return get_type_hints(function).get(name, type(self.options[name]))
        raise KeyError(name)

    @property
    def result_columns(self) -> tuple[ResultColumn, ...]:
        """Returns the columns of its results."""
        return self.columns if self.reduce else (*RANK, *self.columns)

    def partial(self, context: Context, *, compat: Compat = Compat.NONE, **options: Any) -> Any:
        """Returns what one trace contributes. Raises ViewError for an unknown option or compat."""
        self.check(compat, options)
        function = self._functions(compat).function
        seen = context if compat in self.variants else context.get(with_current_forms)
        return function(seen, **_chosen(function, options))

    def combine(self, partials: Sequence[tuple[int, Any]], *, compat: Compat = Compat.NONE, **options: Any) -> Result:
        """Returns the result of the contributions (rank, partial) of all ranks, sorted by rank."""
        found = self._combined(sorted(partials, key=lambda entry: entry[0]), compat, options)
        silent = not len(found) and not found.notes and compat not in self.variants
        return replace(found, notes=(self.nothing,)) if silent else found

    def answer(self, rows: Iterable[Mapping[str, Any] | Sequence[Any]], notes: Sequence[str] = ()) -> Answer:
        """Returns the answer with these rows: their values by the names of the columns, or in their order."""
        names = [column.name for column in self.columns]
        listed = [[row[name] for name in names] if isinstance(row, Mapping) else row for row in rows]
        return Answer({name: [row[place] for row in listed] for place, name in enumerate(names)}, notes)

    def _combined(self, ordered: Sequence[tuple[int, Any]], compat: Compat, options: Mapping[str, Any]) -> Result:
        reduce = self._functions(compat).reduce
        if reduce is not None:
            answer = reduce(ordered, **_chosen(reduce, options))
            return make_result(self.name, self.columns, answer.values, answer.notes)
        notes: list[str] = []
        tables = []
        for rank, answer in ordered:
            table = self.packed(answer).values[_PACKED]
            numbers = pa.array(np.full(table.num_rows, rank, np.int64))
            tables.append(make_table(self.name, self.result_columns, {"rank": numbers, **_columns_of(table)}))
            notes += [note if len(ordered) == 1 else f"rank {rank}: {note}" for note in answer.notes]
        if not tables:
            return make_result(self.name, self.result_columns, {column.name: [] for column in self.result_columns})
        return Result(self.name, self.result_columns, pa.concat_tables(tables), tuple(notes))

    def packed(self, partial: Any) -> Any:
        """Returns a contribution in its most compact form: an Answer as one Arrow table."""
        if self.reduce is not None or _PACKED in partial.values:
            return partial
        return Answer({_PACKED: make_table(self.name, self.columns, partial.values)}, tuple(partial.notes))

    def __call__(self, context: Context, *, compat: Compat = Compat.NONE, **options: Any) -> Result:
        """Returns the result for one trace. Raises ViewError."""
        partial = self.partial(context, compat=compat, **options)
        return self.combine([(context.rank, partial)], compat=compat, **options)

    def __repr__(self) -> str:
        options = f" Options: {', '.join(self.options)}." if self.options else ""
        return f"<View {self.name}: {self.description.splitlines()[0]}{options}>"

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return view_html(self.name, self.description, self.options, self.result_columns)

    def _functions(self, compat: Compat) -> Variant:
        return self.variants.get(compat, Variant(self.function, self.reduce))

    def check(self, compat: Compat, options: Mapping[str, Any]) -> None:
        """Raises ViewError for an unknown option or compat, or a word that its option does not accept."""
        unknown = sorted(set(options) - set(self.options))
        if unknown:
            known = ", ".join(self.options) or "none"
            raise ViewError(f"view {self.name} has no option {', '.join(unknown)}; available: {known}")
        if compat != Compat.NONE and compat not in self.compat:
            known = ", ".join(sorted(self.compat)) or "none"
            raise ViewError(f"view {self.name} cannot reproduce the figures of {compat}; it supports: {known}")
        for name, value in options.items():
            kind = self.option_type(name, compat)
            if not accepts(kind, value):
                known = ", ".join(option_words(kind))
                raise ViewError(f"view {self.name}: {name}={value!r} is not valid; use one of {known}")


VIEWS: dict[str, View] = {}  # by name; kineto_trace.catalog.view_catalog fills it


def view(
    name: str, schema: tuple[ResultColumn, ...], *, reduce: Reduce | None = None, nothing: str = _NOTHING
) -> Callable[[Callable[..., Any]], View]:
    """Registers the decorated function, which takes a Context and its options, as a view.

    nothing: note on a result without rows, if the function has no note: what the traces lack.
    """

    def register(function: Callable[..., Any]) -> View:
        if name in VIEWS:
            raise ValueError(f"two views are called {name}")
        VIEWS[name] = View(name, function, schema, reduce, nothing)
        return VIEWS[name]

    return register


def _chosen(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def _columns_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))
