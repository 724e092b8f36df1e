"""Memory of each device over time, its owners, and the blocks held at one moment."""

from typing import Any, NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group, subtree_sums, sums
from kineto_trace.base.array_types import NOTHING, AnyArray, Flags, Floats, Ints, Ints32, Objects
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import inside_equals, ops
from kineto_trace.structure.allocations import Records, largest_triangles, levels, memory_records
from kineto_trace.structure.call_forests import call_stacks
from kineto_trace.structure.module_calls import shown_names
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NOT_RECORDED = "the trace has no allocations: record with profile_memory=True"
NO_ADDRESSES = "some allocations have no address (PyTorch before 1.10), so their releases are unknown"
METRICS = ("size_increase_bytes", "allocation_count", "allocation_bytes")
Texts = Objects
OTHERS = "other operators"
NO_RESERVED = "the trace does not contain the reserved bytes of the allocator, so its unused memory is unknown"


class Owners(NamedTuple):
    """The operators of records. number: of each record's operator in `texts`."""

    number: Ints
    texts: Texts

    def of(self, places: Ints) -> Texts:
        """Returns the texts for some records; None for NOTHING."""
        texts = np.append(self.texts, np.array([None], object))
        found: Texts = texts[np.append(self.number, NOTHING)[places]]
        return found


@view(
    "memory_statistics",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("operator", "text", "", "operator"),
        ("calls", "int", "", "number of runs"),
        (
            "size_increase_bytes",
            "int",
            "bytes",
            "allocated minus released bytes while it ran, including nested operators",
        ),
        ("self_size_increase_bytes", "int", "bytes", "the same, excluding nested operators"),
        ("allocation_count", "int", "", "number of allocations while it ran, including nested operators"),
        ("self_allocation_count", "int", "", "the same, excluding nested operators"),
        (
            "allocation_bytes",
            "int",
            "bytes",
            "bytes allocated while it ran, including nested operators; releases do not count",
        ),
        ("self_allocation_bytes", "int", "bytes", "the same, excluding nested operators"),
    ),
)
def memory_statistics(context: Context, *, start_ns: int | None = None, end_ns: int | None = None) -> Answer:
    """What each operator allocated and released on each device.

    An allocation or release counts for the innermost operator running on its thread at that time, and for all operators
    around it, once per name. Rows with the largest self_size_increase_bytes come first.

    Options:
    - start_ns, end_ns: only records between these times (Unix ns, both included).
    """
    records = context.get(memory_records)
    chosen, notes = is_between(records, start_ns, end_ns), missing_records_note(records)
    tree, table = context.get(ops), context.trace.table("cpu_op")
    known = chosen & (records.op >= 0)
    stop, outer = tree.nested.tree.stop, ~inside_equals(context, table["name"])
    calls = sums(table["name"].astype(np.int64), np.ones(len(table)), len(context.trace.strings))
    parts = []
    for device in range(len(records.devices)):
        own = metrics(records, known & (records.device == device), records.op, len(table))
        total = {name: subtree_sums(values[tree.row], stop)[tree.place] * outer for name, values in own.items()}
        parts.append(by_operator(table["name"], total, own, np.ones(len(table), np.int64)))
    lost = int(np.count_nonzero(chosen & (records.op < 0)))
    if lost:
        notes.append(f"{lost} of {int(chosen.sum())} allocations and releases happened outside any operator")
    return statistics_columns(context, records, parts, calls, notes, by_name=False)


def is_between(records: Records, start_ns: int | None, end_ns: int | None) -> Flags:
    """Returns which records lie between these times, both included; None means no limit."""
    chosen = np.ones(len(records), np.bool_)
    if start_ns is not None:
        chosen &= records.time >= start_ns
    if end_ns is not None:
        chosen &= records.time <= end_ns
    return chosen


def missing_records_note(records: Records) -> list[str]:
    """Returns the note on a trace without records."""
    return [] if len(records) else [NOT_RECORDED]


def missing_blocks_notes(records: Records) -> list[str]:
    """Returns the notes on a trace without records, or with some unknown blocks."""
    return [*missing_records_note(records), *([] if records.addressed.all() else [NO_ADDRESSES])]


def metrics(records: Records, chosen: Flags, owner: Ints, count: int) -> dict[str, Ints]:
    """Returns for each owner the sums over its own records."""
    rows = np.flatnonzero(chosen)
    allocating = rows[records.bytes[rows] > 0]
    return {
        "size_increase_bytes": sums(owner[rows], records.bytes[rows], count),
        "allocation_count": sums(owner[allocating], np.ones(len(allocating)), count),
        "allocation_bytes": sums(owner[allocating], records.bytes[allocating], count),
    }


def by_operator(name: Ints32, total: dict[str, Ints], own: dict[str, Ints], weight: Ints) -> dict[str, Ints]:
    """The sums over all rows of equal names. `name`: of those names that have any."""
    any_value = np.any([values != 0 for part in (total, own) for values in part.values()], axis=0) & (weight > 0)
    rows = np.flatnonzero(any_value)
    groups = group([name[rows]])
    values = {metric: groups.sums(column[rows] * weight[rows]) for metric, column in total.items()}
    values |= {f"self_{metric}": groups.sums(column[rows] * weight[rows]) for metric, column in own.items()}
    return {"name": name[rows][groups.first].astype(np.int64), **values}


def statistics_columns(
    context: Context, records: Records, parts: list[dict[str, Ints]], calls: Ints, notes: list[str], *, by_name: bool
) -> Answer:
    """Returns the columns of the view memory_statistics. parts: for each device its sums by operator."""
    strings = context.trace.strings
    keys = [f"{prefix}{name}" for name in METRICS for prefix in ("", "self_")]
    values: dict[str, Any] = {key: np.empty(0, np.int64) for key in ("name", "device", *keys)}
    for device, part in enumerate(parts):
        some = np.any([part[key] != 0 for key in keys], axis=0)
        here = {"device": np.full(len(some), device), **part}
        values = {key: np.concatenate([column, here[key][some]]) for key, column in values.items()}
    texts = np.array([strings[number] for number in values["name"].tolist()], object)
    if by_name:
        order = np.lexsort((_ranks(texts), values["device"]))
    else:
        order = np.lexsort((_ranks(texts), -values["self_size_increase_bytes"]))
    return Answer(
        {
            "device": np.array([*records.devices, None], object)[values["device"][order]],
            "operator": texts[order].tolist(),
            "calls": calls[values["name"]][order],
            **{key: values[key][order] for key in keys},
        },
        notes,
    )


def _ranks(texts: Objects) -> Ints:
    """Returns numbers that sort like the texts."""
    place = {text: number for number, text in enumerate(sorted(set(texts.tolist())))}
    return np.array([place[text] for text in texts.tolist()], np.int64)


@view(
    "memory_curve",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("time_ns", "int", "ns", "Unix time; missing with compat=plugin"),
        (
            "time_us",
            "float",
            "us",
            "time since the start of the recording (with compat=plugin, since the first event)",
        ),
        ("allocated_bytes", "float", "bytes", "held by the program from this time on"),
        ("reserved_bytes", "float", "bytes", "held by the allocator from this time on"),
    ),
)
def memory_curve(context: Context, *, max_points: int = 0) -> Answer:
    """How much memory each device held over time: one row per allocation or release, with the level after it.

    Where the trace does not state totals, the curve is relative to the start of the recording.

    Options:
    - max_points: the maximum number of rows per device; the rows that best preserve the shape of the curve are kept
      (largest triangle three buckets). 0 keeps all.
    """
    records = context.get(memory_records)
    limit, notes = point_limit(max_points), missing_records_note(records)
    times, parts = [np.empty(0, np.int64)], []
    for device, name in enumerate(records.devices):
        time, allocated, reserved, relative = levels(records, device)
        since = (time - context.trace.window_start_ns) / 1000
        points = np.stack([since, allocated, np.where(reserved < 0, np.nan, reserved)], axis=1)
        if relative:
            notes.append(f"{name}: the trace has no totals; memory held before the recording is not counted")
        rows = largest_triangles(points, limit) if limit else np.arange(len(points))
        times.append(time[rows])
        parts.append((name, points[rows]))
    return curve_columns(parts, np.concatenate(times), notes)


def point_limit(max_points: int) -> int:
    """Checks the option max_points. Raises ViewError."""
    if max_points < 0 or 0 < max_points < 3:
        raise ViewError(f"view memory_curve: max_points={max_points} cannot show a curve; use 3 or more, or 0 for all")
    return max_points


def curve_columns(parts: list[tuple[str, Floats]], time_ns: Ints | None, notes: list[str]) -> Answer:
    """Returns the columns of the view. parts: for each device the curve: time (us), allocated and reserved bytes."""
    joined = np.concatenate([np.empty((0, 3)), *(points for _, points in parts)])
    return Answer(
        {
            "device": np.repeat(np.array([name for name, _ in parts], object), [len(points) for _, points in parts]),
            "time_ns": [None] * len(joined) if time_ns is None else time_ns,
            "time_us": joined[:, 0],
            "allocated_bytes": joined[:, 1],
            "reserved_bytes": joined[:, 2],
        },
        notes,
    )


@view(
    "memory_events",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("operator", "text", "", "operator that allocated it; for aten::empty… also the enclosing operator"),
        ("size_bytes", "int", "bytes", "size of the block"),
        (
            "allocation_us",
            "float",
            "us",
            "time of its allocation since the start of the recording (with compat=plugin, since the first event); "
            "missing: allocated before",
        ),
        ("release_us", "float", "us", "time of its release, counted in the same way; missing: still held at the end"),
        ("duration_us", "float", "us", "time between allocation and release"),
        ("address", "int", "", "address of the block"),
    ),
)
def memory_events(
    context: Context,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    min_bytes: int = 0,
    max_bytes: int | None = None,
) -> Answer:
    """Every block of memory: which operator allocated it, when it was released, and how long it was held.

    A release belongs to the last allocation at its address. Blocks allocated before the recording have no allocation
    time and no operator; blocks still held at its end have no release time. Rows are ordered by allocation time, blocks
    from before the recording first.

    Options:
    - start_ns, end_ns: only blocks that were allocated or released between these times (Unix ns, both included).
    - min_bytes, max_bytes: only blocks of at least min_bytes and at most max_bytes.
    """
    records = context.get(memory_records)
    notes = missing_blocks_notes(records)
    allocating = np.flatnonzero((records.bytes > 0) & records.addressed)
    alone = np.flatnonzero((records.bytes <= 0) & (records.other == NOTHING) & records.addressed)
    first = np.concatenate([np.full(len(alone), NOTHING), allocating])
    second = np.concatenate([alone, records.other[allocating]])
    names = operator_names(context, records)
    unix = (records.time - context.trace.window_start_ns) / 1000
    chosen = is_between(records, start_ns, end_ns)
    first, second = blocks(records, first, second, chosen, min_bytes=min_bytes, max_bytes=max_bytes)
    return event_columns(records, first, second, unix, names.of(first), notes)


def blocks(
    records: Records,
    first: Ints,
    second: Ints,
    chosen: Flags,
    *,
    min_bytes: int,
    max_bytes: int | None,
) -> tuple[Ints, Ints]:
    """Returns the pairs of allocation and release (or NOTHING) with at least one chosen, and a size in the range.

    chosen: of the records. The smallest and the largest size are included; None means no limit.
    """
    size = np.abs(records.bytes[np.where(first >= 0, first, second)])
    kept = np.append(chosen, False)[first] | np.append(chosen, False)[second]
    kept &= size >= min_bytes
    if max_bytes is not None:
        kept &= size <= max_bytes
    return first[kept], second[kept]


def event_columns(records: Records, first: Ints, second: Ints, time: Floats, names: Texts, notes: list[str]) -> Answer:
    """Returns the columns of the view memory_events. first, second: places of allocations and releases, or NOTHING."""
    one = np.where(first >= 0, first, second)
    at = np.where(first >= 0, time[first] if len(time) else np.nan, np.nan)
    until = np.where(second >= 0, time[second] if len(time) else np.nan, np.nan)
    return Answer(
        {
            "device": np.array([*records.devices, None], object)[records.device[one]],
            "operator": names,
            "size_bytes": np.abs(records.bytes[np.where(second >= 0, second, first)]),
            "allocation_us": at,
            "release_us": until,
            "duration_us": until - at,
            "address": records.address[one].astype(np.int64),
        },
        notes,
    )


def operator_names(context: Context, records: Records) -> Owners:
    """Returns for each record its operator, with the one around it for aten::empty…; None if there is none."""
    tree, table = context.get(ops), context.trace.table("cpu_op")
    rows = np.append(tree.row, NOTHING)  # of no place: none
    place = np.append(tree.place, NOTHING)[records.op]
    outer = rows[np.append(tree.nested.tree.parent, NOTHING)[place]]
    names = np.append(table["name"], NOTHING)
    return operator_texts(context, names[records.op], names[outer], None, None)


def held_at(records: Records, device: int, when: int) -> Ints:
    """Returns the places of the allocations of a device that were held at this time (Unix ns), as far as recorded."""
    rows = np.flatnonzero((records.device == device) & (records.bytes > 0) & (records.time <= when))
    rows = rows[records.addressed[rows]]
    found: Ints = rows[(records.other[rows] == NOTHING) | (records.time[records.other[rows]] > when)]
    return found


def operator_texts(context: Context, name: AnyArray, around: AnyArray, unknown: str | None, root: str | None) -> Owners:
    """Returns the texts of operators (numbers of names; NOTHING if unknown) and of the ones around them (NOTHING:
    root).
    """
    strings = context.get(shown_names)
    groups = group([name, around])
    texts = np.empty(len(groups), object)
    for number, (own, outer) in enumerate(zip(name[groups.first].tolist(), around[groups.first].tolist(), strict=True)):
        text = strings[own] if own >= 0 else unknown
        over = strings[outer] if outer >= 0 else root
        empty = own >= 0 and strings[own].startswith("aten::empty") and over is not None
        texts[number] = f"{over} ({text})" if empty else text
    return Owners(groups.number, texts)


@view(
    "memory_peak",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("peak_bytes", "int", "bytes", "maximum number of bytes allocated at the same time"),
        ("time_ns", "int", "ns", "Unix time at which the peak was first reached"),
        ("reserved_bytes", "int", "bytes", "held by the allocator at that time"),
        (
            "operator",
            "text",
            "",
            "operator that allocated the blocks; missing: outside any operator, or before the recording",
        ),
        ("held_bytes", "int", "bytes", "bytes of its blocks at that time"),
        ("held_pct", "float", "%", "share of peak_bytes"),
        ("blocks", "int", "", "number of its blocks at that time; missing: allocated before the recording"),
    ),
)
def memory_peak(context: Context) -> Answer:
    """What filled the memory of each device at its peak: one row per device and operator.

    A block counts if it was allocated at or before that time and released after it. Memory allocated before the
    recording has a row of its own, with no operator or block count. Rows are grouped by device, most bytes
    first.
    """
    records = context.get(memory_records)
    names = operator_names(context, records)
    found: list[tuple[Any, ...]] = []
    notes = missing_blocks_notes(records)
    for device, label in enumerate(records.devices):
        time, allocated, reserved, relative = levels(records, device)
        top = int(np.argmax(allocated))
        peak, when = int(allocated[top]), int(time[top])
        in_reserve = int(reserved[top]) if reserved[top] >= 0 else None
        if relative:
            notes.append(f"{label}: the trace has no totals; memory held before the recording is not counted")
        rows = held_at(records, device, when)
        groups = group([names.number[rows]])
        held, blocks_held = groups.sums(records.bytes[rows]).tolist(), groups.sizes().tolist()
        owners = names.of(rows[groups.first]).tolist()
        entries: list[tuple[str | None, int, int | None]] = [*zip(owners, held, blocks_held, strict=True)]
        before = peak - sum(size for _, size, _ in entries)
        if before > 0:
            entries.append((None, before, None))
        for name, size, blocks in sorted(entries, key=lambda entry: -entry[1]):
            share = 100 * size / peak if peak else None
            found.append((label, peak, when, in_reserve, name, size, share, blocks))
    return memory_peak.answer(found, notes)


@view(
    "memory_holders",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("time_ns", "int", "ns", "Unix time"),
        ("time_us", "float", "us", "time since the start of the recording"),
        (
            "operator",
            "text",
            "",
            'operator that allocated the blocks; "other operators": all others together; missing: no operator',
        ),
        ("held_bytes", "int", "bytes", "bytes of its blocks that were held at that time"),
    ),
)
def memory_holders(context: Context, *, points: int = 120, operators: int = 8) -> Answer:
    """Which operators' blocks filled the memory of each device over time, at equally spaced moments.

    The operators that held the most at any of these moments have rows of their own; the others share one. Only blocks
    allocated during the recording count: memory allocated earlier has no operator and is not in these rows.

    Options:
    - points: number of moments per device.
    - operators: number of operators with rows of their own.
    """
    if points < 2 or operators < 1:
        raise ViewError(
            f"view memory_holders: points={points}, operators={operators}; use at least 2 points and 1 operator"
        )
    records = context.get(memory_records)
    owners = operator_names(context, records)
    values: dict[str, list[Any]] = {column.name: [] for column in memory_holders.columns}
    for device, label in enumerate(records.devices):
        time = levels(records, device)[0]
        moments = time[0] + (time[-1] - time[0]) * np.arange(points, dtype=np.int64) // (points - 1)
        rows = np.flatnonzero((records.device == device) & (records.bytes > 0) & records.addressed)
        numbers = unique_values(owners.number[rows])
        of_each = [_held(records, rows[owners.number[rows] == number], moments) for number in numbers.tolist()]
        held = np.array(of_each, np.int64).reshape(len(numbers), points)
        order = np.argsort(-held.max(axis=1), kind="stable")
        own, rest = order[:operators], order[operators:]
        texts = [str(text) if text is not None else None for text in owners.texts[numbers[own]].tolist()]
        series = [*zip(texts, held[own], strict=True), *([(OTHERS, held[rest].sum(0))] if len(rest) else [])]
        for text, amounts in series:
            values["device"] += [label] * points
            values["time_ns"] += moments.tolist()
            values["time_us"] += ((moments - context.trace.window_start_ns) / 1000).tolist()
            values["operator"] += [text] * points
            values["held_bytes"] += amounts.tolist()
    return Answer(values, missing_blocks_notes(records))


def _held(records: Records, rows: Ints, moments: Ints) -> Ints:
    """Returns the bytes of these allocations that are held at each of the moments (ascending)."""
    released = rows[records.other[rows] != NOTHING]
    release = records.other[released]
    order = np.argsort(records.time[release], kind="stable")
    gone = _until(records.time[release][order], records.bytes[released][order], moments)
    return _until(records.time[rows], records.bytes[rows], moments) - gone


def _until(times: Ints, amounts: Ints, moments: Ints) -> Ints:
    """Returns the sums of the amounts up to each moment, included. times: ascending."""
    return np.append(0, np.cumsum(amounts))[np.searchsorted(times, moments, "right")]


@view(
    "memory_peak_blocks",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("time_ns", "int", "ns", "Unix time at which the peak of the device was first reached"),
        ("operator", "text", "", "operator that allocated the blocks; missing: outside any operator"),
        ("held_bytes", "int", "bytes", "bytes of these blocks"),
        ("blocks", "int", "", "number of blocks that the operator allocated with this stack"),
        ("call_stack", "text", "", "Python frames, innermost first; missing: not in the trace"),
    ),
)
def memory_peak_blocks(context: Context, *, top: int = 50) -> Answer:
    """The blocks that were held at the memory peak of each device, by operator and Python stack.

    Blocks are those of the view memory_peak, except memory allocated before the recording. Stacks are those of the
    operators, as in the view operators. Rows are grouped by device, most bytes first.

    Options:
    - top: number of rows per device.
    """
    records, stacks = context.get(memory_records), context.get(call_stacks)
    owners = operator_names(context, records)
    stack = np.append(stacks.of_op, NOTHING)[records.op].astype(np.int64)
    found: list[tuple[Any, ...]] = []
    for device, label in enumerate(records.devices):
        time, allocated, _, _ = levels(records, device)
        when = int(time[int(np.argmax(allocated))])
        rows = held_at(records, device, when)
        keys, place = np.unique(np.stack([owners.number[rows], stack[rows]], axis=1), axis=0, return_inverse=True)
        held = np.zeros(len(keys), np.int64)
        np.add.at(held, place.reshape(-1), records.bytes[rows])
        counts = np.bincount(place.reshape(-1), minlength=len(keys))
        for at in np.argsort(-held, kind="stable")[:top].tolist():
            text = stacks.text(context.trace, int(keys[at, 1]))
            found.append((label, when, owners.texts[keys[at, 0]], int(held[at]), int(counts[at]), text))
    return memory_peak_blocks.answer(found, missing_blocks_notes(records))


@view(
    "memory_snapshot",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("time_ns", "int", "ns", "Unix time of the snapshot"),
        ("allocated_bytes", "int", "bytes", "held by the program at that time, as in memory_curve"),
        (
            "operator",
            "text",
            "",
            "operator that allocated the block; missing: outside any operator, or before the recording",
        ),
        ("size_bytes", "int", "bytes", "size of the block, or of all blocks in the row"),
        (
            "blocks",
            "int",
            "",
            "1, or the number of smaller blocks that share the row; missing: allocated before the recording",
        ),
        ("address", "int", "", "address of the block; missing: several blocks, or allocated before the recording"),
        ("allocation_us", "float", "us", "time of its allocation since the start of the recording"),
        ("age_us", "float", "us", "how long it had been held"),
        ("call_stack", "text", "", "Python frames, innermost first; missing: not in the trace"),
    ),
)
def memory_snapshot(context: Context, *, at_ns: int | None = None, top: int = 500) -> Answer:
    """What each device held at one moment: one row per block, the largest first.

    A block counts if it was allocated at or before that time and released after it. At the end, a device has one row
    for all smaller blocks and one for memory allocated before the recording. Stacks are those of the operators, as in
    the view operators.

    Options:
    - at_ns: the moment (Unix ns). Default: the peak of each device.
    - top: number of blocks per device with rows of their own.
    """
    if top < 1:
        raise ViewError(f"view memory_snapshot: top={top} would show no blocks; use 1 or more")
    records, stacks = context.get(memory_records), context.get(call_stacks)
    owners = operator_names(context, records)
    stack = np.append(stacks.of_op, NOTHING)[records.op]
    found: list[tuple[Any, ...]] = []
    for device, label in enumerate(records.devices):
        when, allocated = _moment(records, device, at_ns)
        rows = held_at(records, device, when)
        rows = rows[np.argsort(-records.bytes[rows], kind="stable")]
        own, rest = rows[:top], rows[top:]
        since = (records.time[own] - context.trace.window_start_ns) / 1000
        found += [
            (label, when, allocated, name, size, 1, address, at, age, stacks.text(context.trace, number))
            for name, size, address, at, age, number in zip(
                owners.of(own).tolist(),
                records.bytes[own].tolist(),
                records.address[own].astype(np.int64).tolist(),
                since.tolist(),
                ((when - records.time[own]) / 1000).tolist(),
                stack[own].tolist(),
                strict=True,
            )
        ]
        smaller, before = int(records.bytes[rest].sum()), allocated - int(records.bytes[rows].sum())
        others: list[tuple[int, int | None]] = [(smaller, len(rest))] if len(rest) else []
        others += [(before, None)] if before > 0 else []
        found += [(label, when, allocated, None, *other, None, None, None, None) for other in others]
    return memory_snapshot.answer(found, missing_blocks_notes(records))


def _moment(records: Records, device: int, at_ns: int | None) -> tuple[int, int]:
    """Returns the moment (Unix ns), by default that of the peak, and the bytes that are allocated then."""
    time, allocated, _, _ = levels(records, device)
    if at_ns is None:
        top = int(np.argmax(allocated))
        return int(time[top]), int(allocated[top])
    place = int(np.searchsorted(time, at_ns, "right")) - 1
    if place >= 0:
        return at_ns, int(allocated[place])
    # Before its first record, a device holds what it has after that record minus the change.
    first = int(np.flatnonzero(records.device == device)[0])
    return at_ns, max(int(allocated[0]) - int(records.bytes[first]), 0)


@view(
    "memory_fragmentation",
    columns(
        ("device", "text", "", "CPU, GPU0, …"),
        ("peak_bytes", "int", "bytes", "maximum number of bytes allocated at the same time"),
        ("peak_ns", "int", "ns", "Unix time at which the peak was first reached"),
        ("reserved_bytes", "int", "bytes", "held by the allocator at that time"),
        ("unused_bytes", "int", "bytes", "reserved minus allocated at that time"),
        ("unused_pct", "float", "%", "share of reserved_bytes"),
        ("mean_unused_pct", "float", "%", "unused share of the reserved bytes, mean over time"),
        ("most_unused_bytes", "int", "bytes", "the largest difference between reserved and allocated bytes"),
        ("most_unused_ns", "int", "ns", "Unix time at which this difference was first reached"),
    ),
)
def memory_fragmentation(context: Context) -> Answer:
    """How much of the reserved memory the allocator had not handed out: one row per device.

    Such memory is cached for later use, or lies in gaps between blocks that are too small for a new block. Where the
    trace has no reserved bytes (as for the CPU), a row has only the peak.
    """
    records = context.get(memory_records)
    found: list[tuple[Any, ...]] = []
    notes = missing_records_note(records)
    for device, label in enumerate(records.devices):
        time, allocated, reserved, _ = levels(records, device)
        top = int(np.argmax(allocated))
        unused: tuple[Any, ...] = (None,) * 6
        if (reserved >= 0).all() and reserved.any():
            unused = _unused(time, allocated, reserved, top)
        else:
            notes.append(f"{label}: {NO_RESERVED}")
        found.append((label, int(allocated[top]), int(time[top]), *unused))
    return memory_fragmentation.answer(found, notes)


def _unused(time: Ints, allocated: Ints, reserved: Ints, top: int) -> tuple[Any, ...]:
    """Returns the last columns of memory_fragmentation. top: place of the peak."""
    unused = np.maximum(reserved - allocated, 0)
    share = np.divide(100 * unused, reserved, out=np.zeros(len(time)), where=reserved > 0)
    most, lasting = int(np.argmax(unused)), np.diff(time)
    return (
        int(reserved[top]),
        int(unused[top]),
        float(share[top]),
        float((share[:-1] * lasting).sum() / lasting.sum()) if lasting.any() else float(share[top]),
        int(unused[most]),
        int(time[most]),
    )
