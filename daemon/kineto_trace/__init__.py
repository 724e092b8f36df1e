"""Traces of GPU training: opened from anywhere, analysed at once, written as anything. No service code in here.

    import kineto_trace as kt

    trace = kt.open_trace("trace.json.gz")            # Chrome JSON, Perfetto, a capture's target, a stored trace
    kernels = kt.views.kernels(trace)                 # a Result: kernels.rows(), .table (Arrow), .notes, .columns
    ranks = kt.find_traces("logs/", "more/*.json.gz")  # many ranks: with path and rank of each
    steps = kt.run_view("stragglers", ranks)          # on all cores, memory bounded per rank
    kt.query("SELECT name, count(*) FROM kernel GROUP BY 1", trace)  # the same tables and views in SQL, also a Result
    kernels.to_pandas(), .to_polars(), .plot()        # with pip install pandas matplotlib
    kt.save_trace(trace, "trace.kineto")              # a folder of columns that opens in milliseconds
    kt.export_trace(trace, "trace.pftrace")           # or .json.gz, .json, a TensorBoard log folder, …
    kt.run_view("kernels", trace)                     # the same by the name of the view
    kt.views()                                        # all analyses: name -> View (description, columns, options)

Times in results are microseconds in columns called *_us, or Unix ns in *_ns; each column has a unit and a meaning.
The notes of a result list missing data and assumptions. All errors are TraceError (kineto_trace.errors).

Several views of one trace share intermediate results through its Context: `context = kt.Context(trace)`, then
`kt.run_view("kernels", context)`. On a Dask cluster: `with kt.cluster("tcp://scheduler:8786") as executor`, then
`kt.run_view(…, executor=executor)`.

Nothing is imported before it is used: the daemon imports single modules of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from kineto_trace.catalog.view_methods import views
    from kineto_trace.catalog.view_runner import Request, cluster, run_view, run_views
    from kineto_trace.errors import FileError, TraceError, ViewError
    from kineto_trace.formats.trace_export import Exported
    from kineto_trace.model.context import Context
    from kineto_trace.model.trace import Trace
    from kineto_trace.open.trace_discovery import Source, find_traces
    from kineto_trace.open.trace_opener import open_trace
    from kineto_trace.sql.database import query
    from kineto_trace.view_api.result import Result
    from kineto_trace.view_api.view import Compat, View

__all__ = [
    "Compat",
    "Context",
    "FileError",
    "Request",
    "Result",
    "Source",
    "Trace",
    "TraceError",
    "View",
    "ViewError",
    "cluster",
    "critical_path_overlay",
    "export_trace",
    "find_traces",
    "open_trace",
    "query",
    "run_view",
    "run_views",
    "save_trace",
    "views",
]

_HOMES = {
    "Compat": "view_api.view",
    "Context": "model.context",
    "FileError": "errors",
    "Request": "catalog.view_runner",
    "Result": "view_api.result",
    "Source": "open.trace_discovery",
    "Trace": "model.trace",
    "TraceError": "errors",
    "View": "view_api.view",
    "ViewError": "errors",
    "cluster": "catalog.view_runner",
    "find_traces": "open.trace_discovery",
    "open_trace": "open.trace_opener",
    "query": "sql.database",
    "run_view": "catalog.view_runner",
    "run_views": "catalog.view_runner",
    "views": "catalog.view_methods",
}


def save_trace(trace: "Trace", path: "str | PathLike[str]") -> "Path":
    """Stores the trace as a folder of columns, which open_trace() reads. Nothing is lost. Raises OSError."""
    from pathlib import Path

    from kineto_trace.store.parquet_folder import save_columns

    save_columns(trace, Path(path))
    return Path(path)


def export_trace(trace: "Trace", path: "str | PathLike[str]", *, format: str = "") -> "Exported":
    """Writes the trace in this format, or in the format that the suffix of `path` stands for.

    The formats are those of kineto_trace.formats.trace_export.FORMATS. Raises FormatError, OSError.
    """
    from pathlib import Path

    from kineto_trace.formats import trace_export

    return trace_export.export_trace(trace, Path(path), format)


def critical_path_overlay(trace: "Trace", **options: Any) -> "Trace":
    """Returns the trace with its critical path drawn into it as a track, marks and arrows, ready for export.

    options: annotation, instance, only_critical (see kineto_trace.analysis.critical_path_views.overlay).

    Raises ViewError.
    """
    from kineto_trace.analysis.critical_path_views import overlay
    from kineto_trace.model.context import Context

    return overlay(Context(trace), **options)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
