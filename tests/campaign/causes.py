"""Checks over any traces that causes sum to 100 %, findings claim no more, and every view answers or says why not.

usage: causes.py TRACE...      (files, for example the public ones of HTA and of the TensorBoard plug-in)

Prints for each trace its causes from 5 % of the time on and its findings, so that they can be read beside the trace.
Exit status 1 if a sum is wrong, or a view fails with anything but an error of its own that says what to do.
"""

import sys
import warnings
from pathlib import Path

from kineto_trace.analysis.cause_views import time_causes_view
from kineto_trace.analysis.findings.finding_views import findings_view
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.errors import TraceError
from kineto_trace.model.context import Context
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.cause_checks import wrong

SHOWN_PCT = 5.0


def failing_views(context: Context) -> list[str]:
    """Views that fail without saying what to do."""
    failed = []
    for name, view in VIEWS.items():
        try:
            view(context)
        except TraceError:
            continue
        except Exception as exc:
            failed.append(f"view {name}: {type(exc).__name__}: {exc}")
    return failed


def main() -> int:
    """Prints all traces; returns 1 if anything is wrong."""
    warnings.simplefilter("ignore")
    problems = 0
    for path in map(Path, sys.argv[1:]):
        try:
            context = Context(open_trace(path))
        except TraceError as exc:
            print(f"{path.name}: not read: {exc}")
            continue
        found = [*wrong(context), *failing_views(context)]
        problems += len(found)
        print(f"{path.name}: {'; '.join(found) or 'sums and views are right'}")
        for row in time_causes_view(context, least=SHOWN_PCT).rows():
            print(f"    {row['share_pct']:5.1f} %  {row['meaning']}  [{row['what'] or ''}]"[:150])
        for row in findings_view(context, top=3).rows():
            print(f"    {row['place']}. {row['saving_pct']:.1f} %  {row['title']}"[:150])
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
