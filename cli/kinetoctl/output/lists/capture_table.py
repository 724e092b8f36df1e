"""Captures as `kinetoctl captures list` lists them: one row each. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kinetoctl.client import enum_names
from kinetoctl.output import units
from kinetoctl.output.cell_values import NOTHING
from kinetoctl.output.file_status import where
from kinetoctl.output.json_yaml import plain
from kinetoctl.output.lists.listing import ListColumn, ListKind

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


def _first(values: Sequence[str]) -> str:
    """The first value, and how many more there are."""
    more = f" (+{len(values) - 1:,})" if len(values) > 1 else ""
    return f"{values[0]}{more}" if values else NOTHING


def stored(capture: "pb.Capture") -> int:
    """Bytes of its files."""
    return sum(file.size_bytes for target in capture.targets for file in target.files)


def _jobs(capture: "pb.Capture") -> list[str]:
    return sorted({target.process.job_id for target in capture.targets if target.process.job_id})


def _labels(capture: "pb.Capture") -> str:
    return ",".join(f"{key}={capture.spec.labels[key]}" for key in sorted(capture.spec.labels)) or NOTHING


def commands(capture: "pb.Capture") -> list[str]:
    """The command lines of its processes, each once."""
    return list(dict.fromkeys(" ".join(target.process.command) for target in capture.targets))


def iso_utc(unix_ns: int) -> str | None:
    """A date and time in UTC to the second; None for 0."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if unix_ns else None


def iso_local(unix_ns: int) -> str | None:
    """A local date and time to the second, with its offset; None for 0."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).astimezone().isoformat() if unix_ns else None


def document(capture: "pb.Capture") -> dict[str, Any]:
    """The capture for JSON, with its times as texts."""
    times = {
        f"{name}_{zone}": text(getattr(capture, f"{name}_ns"))
        for name in ("created", "ended")
        for zone, text in (("local", iso_local), ("utc", iso_utc))
    }
    return {**plain(capture), **times}


COLUMNS = (
    ListColumn(title="ID", cell=lambda each: each.id),
    ListColumn(title="STATUS", cell=lambda each: enum_names.capture_status(each.status)),
    ListColumn(title="AGE", cell=lambda each: units.age(each.created_ns), moves=True),
    ListColumn(title="CREATED", cell=lambda each: iso_local(each.created_ns) or NOTHING, wide=True),
    ListColumn(title="CREATED UTC", cell=lambda each: iso_utc(each.created_ns) or NOTHING, wide=True),
    ListColumn(title="ENDED", cell=lambda each: iso_local(each.ended_ns) or NOTHING, wide=True),
    ListColumn(title="PID", cell=lambda each: _first([str(target.pid) for target in each.targets])),
    ListColumn(title="JOB", cell=lambda each: _first(_jobs(each))),
    ListColumn(title="SIZE", cell=lambda each: units.size(stored(each))),
    ListColumn(title="WHERE", cell=where),
    ListColumn(title="FORMATS", cell=lambda each: ",".join(each.spec.formats) or NOTHING, wide=True),
    ListColumn(title="LABELS", cell=_labels),
    ListColumn(title="COMMAND", cell=lambda each: _first(commands(each))),
)
CAPTURES = ListKind(
    columns=COLUMNS,
    key=lambda each: (each.id,),
    document=document,
    orders={
        "age": (lambda each: each.created_ns, True),  # the newest first
        "size": (stored, True),
        "status": (lambda each: enum_names.capture_status(each.status), False),
        "pid": (lambda each: min((target.pid for target in each.targets), default=0), False),
        "job": (lambda each: (not _jobs(each), _jobs(each)), False),
    },
)
