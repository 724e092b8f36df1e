"""What the daemon says of captures and processes, as values for templates and JSON."""

import time
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kineto_protos.units import format_duration

from kinetoctl.client import enum_names
from kinetoctl.client.tracing import has_ended
from kinetoctl.output import units
from kinetoctl.output.capture_summary import target_lines
from kinetoctl.output.lists.capture_table import commands, stored

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

_ELSEWHERE = ("analyse", "open with", "snapshot in")  # what is printed for terminals alone


def row_of(capture: "pb.Capture") -> dict[str, Any]:
    """A capture in the list."""
    targets = capture.targets
    return {
        "id": capture.id,
        "status": enum_names.capture_status(capture.status),
        "age": units.age(capture.created_ns),
        "age_s": max(0, time.time_ns() - capture.created_ns) // 10**9,
        "pids": [target.pid for target in targets],
        "command": next(iter(commands(capture)), ""),
        "job": next((target.process.job_id for target in targets if target.process.job_id), ""),
        "bytes": stored(capture),
        "labels": ", ".join(f"{key}={capture.spec.labels[key]}" for key in sorted(capture.spec.labels)),
    }


def facts(capture: "pb.Capture") -> list[tuple[str, str]]:
    """Figures of the whole capture."""
    found = [
        ("host", capture.host),
        ("made", units.moment(capture.created_ns)),
        ("processes", units.count(len(capture.targets))),
        ("size", units.size(stored(capture))),
    ]
    if capture.ended_ns:
        found.append(("took", format_duration(capture.ended_ns - capture.created_ns)))
    labels = [(f"label {key}", capture.spec.labels[key]) for key in sorted(capture.spec.labels)]
    return found + labels + ([("pinned", "yes")] if capture.pinned else [])


def target_facts(capture: "pb.Capture") -> list[dict[str, Any]]:
    """Of each process: its verdict, and the lines that `kinetoctl captures show` prints of it."""
    return [
        {
            "name": enum_names.target(target),
            "command": " ".join(target.process.command),
            "state": _state(target),
            "lines": _grouped(target_lines(capture, target, {})),
        }
        for target in capture.targets
    ]


def running(capture: "pb.Capture | None") -> bool:
    """Whether a capture has not ended."""
    return capture is not None and not has_ended(capture)


def has_trace(capture: "pb.Capture | None") -> bool:
    """Whether there is anything to analyse."""
    return capture is None or any(target.files for target in capture.targets)


def _state(target: "pb.Target") -> str:
    state = enum_names.target_state(target.state)
    return enum_names.verdict(target.verdict) if state == "ENDED" else state


def _grouped(lines: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """The lines by label; a line without one belongs to the label above it."""
    labelled, label = [], ""
    for name, text in lines:
        label = name or label
        if label not in _ELSEWHERE:
            labelled.append((label, text))
    return [(key, [text for _, text in group]) for key, group in groupby(labelled, key=lambda line: line[0])]
