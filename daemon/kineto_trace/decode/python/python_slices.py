"""Turns samples of Python stacks into slices.

Theory of operation
    A slice is a run of consecutive samples of one thread that share the function and its callers at one depth, and the
    lines at which these were called; its own line may change within it. It begins with its first sample and ends with
    the next sample of its thread. A thread that is not seen for more than two periods while other threads are has
    vanished: its slices end when another thread is seen next, after two periods at the latest. A moment at which no
    thread was seen ends nothing: the sampler itself was delayed. Each thread has its own sample times, so "at the same
    tick" means less than half a period apart.

    The samples are sorted by thread and time. Each depth then takes one pass over the samples that reach it, from the
    deepest depth up. All of this is array work, except for the texts of lines.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.model.line_counts import (
    STATES,
    WAITS,
    CalleeCount,
    LineCount,
    format_callees,
    format_lines,
)
from kineto_trace.model.trace import NO_MODULE, NO_ROW, NO_STRING, StringTable, Table, make_table

MAX_DEPTH = 1024  # frames; deeper nodes are rejected

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Trie:
    """Nodes by index (from 1; 0 means none), and the frames that they are lines of.

    A frame is a function below its caller's frame, called at one line of it.
    """

    keys: npt.NDArray[np.uint64]  # node keys, ascending; index = position + 1
    parent: Ints  # of each node: the index of the caller's node
    frame: Ints  # of each node
    line: Ints  # of each node; 0: unknown
    callee: Ints  # of each node: the number of the text that names it; NO_STRING: unknown
    depth: Ints  # of each frame: 0 for the outermost, -1 for frame 0, which means none
    name: Ints  # of each frame: the number of its text
    call_line: Ints  # of each frame: the caller's line; 0: unknown

    def index(self, nodes: npt.NDArray[Any]) -> Ints:
        """Returns the index of each node key; 0 for keys that are not in the table."""
        if not len(self.keys):
            return np.zeros(len(nodes), np.int64)
        at = np.searchsorted(self.keys, nodes)
        at[at == len(self.keys)] = 0
        return np.where(self.keys[at] == nodes, at + 1, 0)


@dataclass(frozen=True, slots=True)
class Samples:
    """One value per sample. line: of the innermost frame, 0: unknown. state: number into STATES.

    callee: the number of the text that names what that frame calls; NO_STRING: unknown, or nothing. wait: number into
    WAITS. gil_holder: the thread that held the GIL when this one waited for it; 0: unknown.
    """

    time: Ints
    thread: Ints
    node: Ints
    line: Ints
    callee: Ints
    state: Ints
    wait: Ints
    gil_holder: Ints

    def sorted(self) -> "Samples":
        """Returns the samples sorted by thread and time."""
        order = np.lexsort((self.time, self.thread))
        return Samples(*(getattr(self, column.name)[order] for column in fields(self)))


def slices(given: Samples, trie: Trie, period: int, strings: StringTable) -> Table:
    """Returns the samples as a table python_function."""
    samples = given.sorted()
    joined, ends = _continuity(samples.time, samples.thread, period)
    depth = trie.depth[trie.frame[samples.node]]
    levels: list[dict[str, Ints]] = []
    current = samples.node.copy()
    children: dict[str, Ints] | None = None
    for level in range(int(depth.max(initial=-1)), -1, -1):
        active = np.flatnonzero(depth >= level)
        leaf = depth[active] == level
        lines = np.where(leaf, samples.line[active], trie.line[current[active]])
        runs = _runs(active, trie.frame[current], joined, lines)
        runs["leaf"] = np.where(leaf, runs["run_of_sample"], -1)
        if children is not None:
            children["parent"] = runs["run_of_sample"][np.searchsorted(active, children["first"])]
        runs["depth"] = np.full(len(runs["first"]), level)
        runs["active"] = active
        levels.append(runs)
        children = runs
        current[active] = trie.parent[current[active]]
    return _assemble(levels[::-1], samples, ends, trie, strings)


def _continuity(times: Ints, threads: Ints, period: int) -> tuple[Flags, Ints]:
    """Returns for each sample whether it continues the one before it, and the time until which its frames ran."""
    seen = np.sort(times)
    joined = np.zeros(len(times), np.bool_)
    gap = times[1:] - times[:-1]
    later = np.searchsorted(seen, times[:-1] + period // 2, "right")  # the first sample of the next tick
    others = np.searchsorted(seen, times[1:] - period // 2, "left") > later  # any sample between the two ticks
    joined[1:] = (threads[1:] == threads[:-1]) & ((gap <= 2 * period + period // 2) | ~others)
    following = np.searchsorted(seen, times + period // 2, "right")
    ends = np.append(seen, 0)[following]
    ends = np.where(following < len(seen), np.minimum(ends, times + 2 * period), times + period)
    continued = np.flatnonzero(joined)
    ends[continued - 1] = times[continued]  # the thread was seen again, so there is no limit
    return joined, ends


def _runs(active: Ints, frame: Ints, joined: Flags, lines: Ints) -> dict[str, Ints]:
    """Returns runs of samples with the same frame at one depth: first and last sample, frame, count, commonest line."""
    own = frame[active]
    begins = np.ones(len(active), np.bool_)
    begins[1:] = (active[1:] - active[:-1] != 1) | ~joined[active[1:]] | (own[1:] != own[:-1])
    starts = np.flatnonzero(begins)
    counts = np.diff(np.append(starts, len(active)))
    run = np.cumsum(begins) - 1
    return {
        "first": active[starts],
        "last": active[starts + counts - 1],
        "frame": own[starts],
        "samples": counts,
        "line": _most_frequent(run, lines, starts),
        "run_of_sample": run,
        "parent": np.full(len(starts), NO_ROW),
    }


def _most_frequent(run: Ints, lines: Ints, starts: Ints) -> Ints:
    """Returns the most frequent line of each run; the lowest of several; 0 if no line is known."""
    found = lines[starts]
    lowest, highest = np.minimum.reduceat(lines, starts), np.maximum.reduceat(lines, starts)
    mixed = (lowest != highest)[run]
    if mixed.any():
        keys, counts = np.unique(run[mixed] << 32 | lines[mixed], return_counts=True)
        counts[keys & 0xFFFFFFFF == 0] = 0  # a known line takes precedence
        best = np.lexsort((-(keys & 0xFFFFFFFF), counts, keys >> 32))  # the last entry of each run is the best one
        found[keys[best] >> 32] = keys[best] & 0xFFFFFFFF
    return found


def _assemble(levels: list[dict[str, Ints]], samples: Samples, ends: Ints, trie: Trie, strings: StringTable) -> Table:
    """Joins the runs of all depths into one table, outermost first; parents become row numbers."""
    if not levels:
        return make_table("python_function", 0, {})
    rows = np.cumsum([0, *(len(level["first"]) for level in levels)])
    row_of_sample = np.full(len(samples.time), NO_ROW)  # of the innermost slice
    for number, level in enumerate(levels):
        if number:
            level["parent"] = level["parent"] + rows[number - 1]
        innermost = level["leaf"] >= 0
        row_of_sample[level["active"][innermost]] = level["leaf"][innermost] + rows[number]
    names = ("first", "last", "frame", "samples", "line", "parent", "depth")
    joined = {name: np.concatenate([level[name] for level in levels]) for name in names}
    start = samples.time[joined["first"]]
    placed = row_of_sample >= 0
    own = row_of_sample[placed]
    counts = _counts(own, samples.state[placed], len(STATES), rows[-1])
    waits = _counts(own, samples.wait[placed], len(WAITS), rows[-1])
    columns = {
        "start": start,
        "duration": ends[joined["last"]] - start,
        "name": trie.name[joined["frame"]],
        "thread": samples.thread[joined["first"]],
        "depth": joined["depth"],
        "parent": joined["parent"],
        "samples": joined["samples"],
        "self_samples": np.sum(counts, axis=0),
        **dict(zip(STATES[1:], counts[1:], strict=True)),
        **dict(zip(WAITS[1:], waits[1:], strict=True)),
        "line": joined["line"],
        "lines": _line_texts(own, samples.line[placed], samples.state[placed], rows[-1], strings),
        "callees": _callee_texts(samples, placed, own, rows[-1], strings),
        "module": np.full(len(start), NO_MODULE),
        "call_line": trie.call_line[joined["frame"]],
        "gil_holder": _gil_holders(own, samples.gil_holder[placed], rows[-1]),
    }
    return make_table("python_function", len(start), columns)


def _counts(row: Ints, numbers: Ints, kinds: int, rows: int) -> list[Ints]:
    """Returns for each kind the number of samples by row."""
    return [np.bincount(row[numbers == kind], minlength=rows) for kind in range(kinds)]


def _gil_holders(row: Ints, holder: Ints, rows: int) -> Ints:
    """Returns for each row the thread that held the GIL most often while it waited; 0 for rows that never waited."""
    found = np.zeros(rows, np.int64)
    waited = holder > 0
    keys, counts = np.unique(row[waited] << 32 | holder[waited], return_counts=True)
    best = np.lexsort((-(keys & 0xFFFFFFFF), counts, keys >> 32))  # the last entry of each row is the best one
    found[keys[best] >> 32] = keys[best] & 0xFFFFFFFF
    return found


def _line_texts(row: Ints, line: Ints, state: Ints, rows: int, strings: StringTable) -> Ints:
    """Returns for each row the number of the text with its self samples by line and state."""
    known = line > 0
    keys, place = np.unique(row[known] << 32 | line[known], return_inverse=True)
    counts = np.bincount(place.reshape(-1) * len(STATES) + state[known], minlength=len(keys) * len(STATES))
    texts: dict[int, list[LineCount]] = {}
    for key, by_state in zip(keys.tolist(), counts.reshape(-1, len(STATES)).tolist(), strict=True):
        texts.setdefault(key >> 32, []).append(LineCount(key & 0xFFFFFFFF, tuple(by_state)))  # type: ignore[arg-type]
    found = np.full(rows, NO_STRING, np.int64)
    for number, lines in texts.items():
        found[number] = strings.add(format_lines(lines))
    return found


def _callee_texts(samples: Samples, placed: Flags, row: Ints, rows: int, strings: StringTable) -> Ints:
    """Returns for each row the number of the text with its self samples by line, callee and state.

    placed: which samples are in a row. row: of each of these.
    """
    line, callee, state = (column[placed] for column in (samples.line, samples.callee, samples.state))
    known = (line > 0) & (callee != NO_STRING)
    keys, place = np.unique(np.stack([row, line, callee])[:, known], axis=1, return_inverse=True)
    counts = np.bincount(place.reshape(-1) * len(STATES) + state[known], minlength=keys.shape[1] * len(STATES))
    texts: dict[int, list[CalleeCount]] = {}
    for (number, at, name), by_state in zip(keys.T.tolist(), counts.reshape(-1, len(STATES)).tolist(), strict=True):
        texts.setdefault(number, []).append(CalleeCount(at, strings.strings[name], tuple(by_state)))  # type: ignore[arg-type]
    found = np.full(rows, NO_STRING, np.int64)
    for number, callees in texts.items():
        found[number] = strings.add(format_callees(callees))
    return found
