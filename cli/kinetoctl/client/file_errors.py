"""Errors of the trace library and of writing files, translated into those of kinetoctl."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kineto_trace.errors import FormatError, QueryError, TraceError, ViewError

from kinetoctl.errors import NotWritten, TraceUnreadable, WrongAnalysis

_WRONG = (ViewError, QueryError, FormatError)


@contextmanager
def trace_errors() -> Iterator[None]:
    """Translates the errors of the trace library into those of kinetoctl."""
    try:
        yield
    except _WRONG as exc:
        raise WrongAnalysis(str(exc), reason_code=exc.reason_code) from exc
    except TraceError as exc:
        raise TraceUnreadable(str(exc), reason_code=exc.reason_code) from exc


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Says which file could not be written, and why."""
    try:
        yield
    except OSError as exc:
        raise NotWritten(f"cannot write {path}: {exc.strerror or exc}") from exc
