"""Training iterations as annotations: "ProfilerStep#N" on the thread that steps.

Theory of operation
    The agent records when each iteration began; iteration N lasts until N + 1 begins. Iterations are clipped to the
    window. Readers (HTA, TensorBoard) find the iterations by these names, which torch.profiler uses too.

    An iteration begins inside the hook that noticed it, often a few microseconds before the end of an annotation such
    as "Optimizer.step#SGD.step". Rows of one thread must nest, so a border moves to the end of those ops of the
    previous iteration that it cuts.

    If the program's own profiler wrote "ProfilerStep#" annotations into this trace, only those are kept.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import NO_SEQUENCE, NO_STRING, OP_TABLES, StringTable, Table, make_table

STEP_PREFIX = "ProfilerStep#"
_SCOPE_USER = 7
_MAX_ITERATIONS = 4096
_MAX_NUMBER = 2**53  # larger numbers are not counts, and JSON readers would round them
_MAX_CUT_OPS = 65536  # more cutting ops than threads can nest: the data is odd, so the borders stay
Ints = npt.NDArray[np.int64]
_Row = tuple[int, int, int, bool]  # number, start and end (Unix ns), whether it ended in the window


def add_iterations(tables: Mapping[str, Table], strings: StringTable, target: TargetInfo) -> dict[str, Table]:
    """Adds a user_annotation for each iteration of `target.iterations` that overlaps the target's window.

    The tables must already be clipped to the window. Without iterations, a window or a thread, nothing is added.
    """
    rows = _rows(target)
    if not rows or target.iteration_thread <= 0 or _has_own(tables, strings):
        return dict(tables)
    edges = _nested(tables, target.iteration_thread, rows)
    added = make_table(
        "user_annotation",
        len(rows),
        {
            "start": edges[:, 0],
            "duration": edges[:, 1] - edges[:, 0],
            "name": strings.add_all([f"{STEP_PREFIX}{number}" for number, *_ in rows]),
            "thread": np.full(len(rows), target.iteration_thread),
            "id": np.arange(len(rows)) + _first_free_id(tables),
            "sequence": np.full(len(rows), NO_SEQUENCE),
            "torch_thread": np.full(len(rows), _torch_thread(tables, target.iteration_thread)),
            "scope": np.full(len(rows), _SCOPE_USER),
            "finished": np.array([finished for *_, finished in rows]),
            "inputs": np.full(len(rows), NO_STRING),
        },
    )
    before = tables.get("user_annotation")
    return {**tables, "user_annotation": added if before is None else _joined(before, added)}


def whole_iterations(target: TargetInfo) -> list[int]:
    """Returns the numbers of the iterations that began and ended in the window."""
    begun = dict(_known(target))
    return [
        number
        for number, start_ns in begun.items()
        if target.window_start_ns <= start_ns and 0 < begun.get(number + 1, 0) <= target.window_end_ns
    ]


def _known(target: TargetInfo) -> list[tuple[int, int]]:
    """Returns number and start of the reported iterations; implausible entries are skipped."""
    known: list[tuple[int, int]] = []
    for entry in target.iterations[:_MAX_ITERATIONS]:
        if _is_iteration(entry) and (not known or (entry[0] > known[-1][0] and entry[1] >= known[-1][1])):
            known.append((entry[0], entry[1]))
    return known


def _rows(target: TargetInfo) -> list[_Row]:
    """Returns the iterations that overlap the window, clipped to it."""
    first_ns, last_ns = target.window_start_ns, target.window_end_ns
    known = _known(target)
    rows = []
    for place, entry in enumerate(known):
        following = known[place + 1] if place + 1 < len(known) else None
        if following is not None and following[0] != entry[0] + 1:
            continue  # the iterations in between are unknown
        start_ns = max(entry[1], first_ns)
        ended = following is not None and following[1] <= last_ns
        end_ns = following[1] if following is not None and ended else last_ns
        if start_ns < end_ns:
            rows.append((entry[0], start_ns, end_ns, ended))
    return rows


def _is_iteration(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(value, int) for value in entry)
        and 0 <= entry[0] < _MAX_NUMBER
        and 0 < entry[1] < 2**63
    )


def _has_own(tables: Mapping[str, Table], strings: StringTable) -> bool:
    """Tells whether the program's own profiler has written its steps."""
    numbers = [number for number, text in enumerate(strings.strings) if text.startswith(STEP_PREFIX)]
    return bool(numbers) and any(
        bool(np.isin(tables[kind]["name"], numbers).any()) for kind in OP_TABLES if kind in tables
    )


def _first_free_id(tables: Mapping[str, Table]) -> int:
    return 1 + max(
        (int(tables[kind]["id"].max()) for kind in OP_TABLES if kind in tables and len(tables[kind])), default=0
    )


def _torch_thread(tables: Mapping[str, Table], thread: int) -> int:
    """Returns torch's number of this thread if an op states it, otherwise 0."""
    for kind in OP_TABLES:
        if kind in tables:
            numbers = tables[kind]["torch_thread"][(tables[kind]["thread"] == thread)]
            if len(numbers):
                return int(numbers.max())
    return 0


def _nested(tables: Mapping[str, Table], thread: int, rows: list[_Row]) -> Ints:
    """Returns start and end of each row, moved to the end of the ops that they cut (see above)."""
    edges = np.array([(start_ns, end_ns) for _, start_ns, end_ns, _ in rows], np.int64)
    cutting = _ops_across(tables, thread, np.unique(edges))
    if not 0 < len(cutting) <= _MAX_CUT_OPS:
        return edges
    moved = edges.copy()
    limits = np.append(edges[1:, 1], np.iinfo(np.int64).max)  # a border never passes the end of the next iteration
    for row, (start_ns, end_ns) in enumerate(edges):
        across = cutting[(cutting[:, 0] < start_ns) & (cutting[:, 1] > start_ns) & (cutting[:, 1] < end_ns)]
        moved[row, 0] = max(start_ns, across[:, 1].max(initial=0))
        across = cutting[(cutting[:, 0] >= start_ns) & (cutting[:, 0] < end_ns) & (cutting[:, 1] > end_ns)]
        moved[row, 1] = max(end_ns, across[across[:, 1] < limits[row], 1].max(initial=0))
    return moved


def _ops_across(tables: Mapping[str, Table], thread: int, borders: Ints) -> Ints:
    """Returns start and end of the thread's ops that contain one of the borders."""
    found = []
    for kind in OP_TABLES:
        if kind in tables:
            table = tables[kind]
            mine = np.flatnonzero(table["thread"] == thread)
            start, end = table["start"][mine], table["start"][mine] + table["duration"][mine]
            across = np.searchsorted(borders, start, "right") < np.searchsorted(borders, end, "left")
            found.append(np.stack([start[across], end[across]], axis=1))
    return np.concatenate(found) if found else np.empty((0, 2), np.int64)


def _joined(before: Table, added: Table) -> Table:
    return Table(
        before.kind, {name: np.concatenate([column, added.columns[name]]) for name, column in before.columns.items()}
    )
