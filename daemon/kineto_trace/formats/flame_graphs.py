"""Flame graphs: folded stacks (read by flamegraph.pl, inferno and others) and speedscope's JSON.

Theory of operation
    Equal stacks of a trace (structure/call_forests.py) are one, with a weight. There are four graphs:

    - host: self time of each op, annotation or Python frame
    - gpu: time of kernels, copies and fills, each below the stack that launched it; work of CUDA graphs also below the
      operators that captured it, where those are known
    - samples: how often each line of a Python frame was seen running itself, or waiting for the GIL
    - idle: how often each line was seen off the CPU otherwise

    The outermost frame is the thread. Times are in ns; times of overlapping GPU work add up.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
from kineto_agent import __version__

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable
from kineto_trace.structure.call_forests import (
    CallForest,
    StackKind,
    Stacks,
    gpu_calls,
    host_calls,
    merged,
    sampled_lines,
)
from kineto_trace.structure.trace_forms import with_current_forms

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class FlameGraph(StrEnum):
    """The quantity that a flame graph counts."""

    HOST = "host"
    GPU = "gpu"
    SAMPLES = "samples"
    IDLE = "idle"


def stacks(context: Context, graph: FlameGraph) -> Stacks:
    """Returns the stacks of a trace with their weights; empty if the trace has no data for this graph."""
    if graph in (FlameGraph.SAMPLES, FlameGraph.IDLE):
        return merged(_in_state(sampled_lines(context), idle=graph is FlameGraph.IDLE))
    meant = context.get(with_current_forms)
    return merged(host_calls(meant) if graph is FlameGraph.HOST else gpu_calls(meant))


def _in_state(forest: CallForest, *, idle: bool) -> CallForest:
    """Returns the samples of lines that were idle, or all others."""
    asleep = np.flatnonzero(forest.kind == StackKind.IDLE)
    if not idle:
        own = forest.own.copy()
        own[asleep] = 0
        return replace(forest, own=own)
    own = np.zeros(len(forest), np.int64)
    np.add.at(own, forest.parent[asleep], forest.own[asleep])
    return replace(forest, own=own)


# ------------------------------------------------------------ files


def folded(found: Stacks) -> bytes:
    """Returns one line per stack with weight: its frames (outermost first, separated by ;), a space, the weight."""
    safe = {number: _folded_frame(found.frames[number]) for number in unique_values(found.frame).tolist()}
    lines = (";".join(safe[frame] for frame in path) + f" {weight}\n" for path, weight in _paths(found))
    return "".join(lines).encode("utf-8", "replace")


def _paths(found: Stacks) -> Iterator[tuple[list[int], int]]:
    """Yields the frames of each stack that has weight, outermost first, and the weight."""
    parents, frames, weights = found.parent.tolist(), found.frame.tolist(), found.weight.tolist()
    for place in np.flatnonzero(found.weight > 0).tolist():
        path, at = [], place
        while at >= 0:
            path.append(frames[at])
            at = parents[at]
        yield path[::-1], weights[place]


def _folded_frame(text: str) -> str:
    return " ".join(text.replace(";", ":").split()) or "?"


def speedscope(graphs: Mapping[FlameGraph, Stacks], name: str) -> bytes:
    """Returns one profile per graph that has any weight; GPU time first, then host time."""
    numbers = StringTable()
    profiles = [
        _profile(graph, graphs[graph], numbers) for graph in _ORDER if graph in graphs and graphs[graph].weight.any()
    ]
    value = {
        "$schema": SCHEMA,
        "name": name,
        "activeProfileIndex": 0,
        "exporter": f"kinetod {__version__}",
        "shared": {"frames": [{"name": text} for text in numbers.strings]},
        "profiles": profiles,
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


_ORDER = (FlameGraph.GPU, FlameGraph.HOST, FlameGraph.SAMPLES, FlameGraph.IDLE)
_TITLES = {
    FlameGraph.GPU: "GPU time by launching stack",
    FlameGraph.HOST: "host time",
    FlameGraph.SAMPLES: "Python samples",
    FlameGraph.IDLE: "Python samples, idle",
}


def _profile(graph: FlameGraph, found: Stacks, numbers: StringTable) -> dict[str, Any]:
    own = {number: numbers.add(found.frames[number]) for number in unique_values(found.frame).tolist()}
    samples, weights = [], []
    for path, weight in _paths(found):
        samples.append([own[frame] for frame in path])
        weights.append(weight)
    return {
        "type": "sampled",
        "name": _TITLES[graph],
        "unit": "none" if graph in (FlameGraph.SAMPLES, FlameGraph.IDLE) else "nanoseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
