"""The window of a trace that an annotation's instances span."""

from dataclasses import dataclass

import numpy as np

from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import OP_TABLES

Instance = int | str | tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Window:
    """A window in Unix ns, including its end."""

    start_ns: int
    end_ns: int
    notes: tuple[str, ...] = ()


def instance_range(instance: Instance) -> tuple[int, int] | None:
    """Returns the first and last instance, counted from 0; None for all. Raises ViewError."""
    if instance is None:
        return None
    if isinstance(instance, str):
        parts = instance.split(":")
        if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
            raise ViewError(f"option instance: {instance!r} is neither a number nor a range such as 2:4")
        return int(parts[0]), int(parts[-1])
    return (instance, instance) if isinstance(instance, int) else (instance[0], instance[1])


def find_window(context: Context, annotation: str, instance: Instance, *, optional: bool = False) -> Window:
    """Returns the window from the start of the first wanted instance to the end of the last.

    annotation: part of a name; "" is the whole trace. optional: if there is no such annotation, take the whole trace
    and add a note; otherwise raise ViewError.
    """
    trace = context.trace
    if not annotation:
        return _whole(context)
    wanted = np.array([number for number, text in enumerate(trace.strings) if annotation in text], np.int64)
    tables = [trace.table(kind) for kind in OP_TABLES]
    chosen = [np.isin(table["name"], wanted) for table in tables]
    start = np.concatenate([table["start"][rows] for table, rows in zip(tables, chosen, strict=True)])
    end = np.concatenate([table.end()[rows] for table, rows in zip(tables, chosen, strict=True)])
    if not len(start):
        if optional:
            whole = _whole(context)
            note = (
                f"the trace has no annotation with {annotation!r} in its name, so the path is that of the whole trace"
            )
            return Window(whole.start_ns, whole.end_ns, (note,))
        raise ViewError(
            f"no annotation with {annotation!r} in its name is in the trace; annotation='' takes the whole trace"
        )
    order = np.argsort(start, kind="stable")
    first, last = instance_range(instance) or (0, len(order) - 1)
    if not 0 <= first <= last < len(order):
        raise ViewError(f"option instance: {annotation!r} has the instances 0 to {len(order) - 1}, not {instance!r}")
    picked = order[first : last + 1]
    return Window(int(start[picked].min()), int(end[picked].max()))


def _whole(context: Context) -> Window:
    tables = [table for table in context.trace.tables.values() if "start" in table.columns and len(table)]
    tables = [table for table in tables if table.kind not in ("flow", "other", "overhead", "counter")]
    if not tables:
        return Window(context.trace.window_start_ns, context.trace.window_end_ns)
    start = min(int(table["start"].min()) for table in tables)
    return Window(start, max(int(table.end().max()) for table in tables))
