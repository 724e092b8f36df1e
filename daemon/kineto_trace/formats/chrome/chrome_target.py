"""Reads what a Chrome trace says about its process: ids, names, rank, devices, versions, options."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kineto_trace.formats.chrome.chrome_tables import MADE_UP, ChromeRows
from kineto_trace.formats.chrome.chrome_writer import LOSS_KEYS, OPTION_KEYS
from kineto_trace.model import source_coverage
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.target_info import MAX_RATIO, TargetInfo
from kineto_trace.model.trace import TEXT_ID, Losses, Table
from kineto_trace.model.trace_header import value

MAX_METADATA_ROWS = 1 << 16
_THREAD = re.compile(r"thread -?\d+ \((.*)\)$", re.DOTALL)
_NAME = msgspec.json.Decoder(dict[str, Any])


class TargetDescription(NamedTuple):
    """What a file states beside its tables.

    devices: Kineto's deviceProperties; versions: cupti_version, cuda_runtime_version, … losses: when it was recorded.
    """

    target: TargetInfo
    devices: tuple[Mapping[str, Any], ...]
    versions: dict[str, int]
    coverage: tuple[SourceCoverage, ...]
    losses: Losses


def describe(head: Mapping[str, str], loaded: ChromeRows) -> TargetDescription:
    """Returns what the head and the metadata rows (ph "M") state."""
    pid = _main_pid(loaded)
    distributed = value(head, "distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    ours = value(head, "kinetod")
    ours = ours if isinstance(ours, dict) else {}
    process, threads = _names(loaded, pid)
    devices = value(head, "deviceProperties")
    target = TargetInfo(
        capture_id=_text(ours.get("capture_id")),
        host=_text(value(head, "host_name")),
        pid=pid if 0 <= pid < 2**31 else 0,
        process_name=process,
        command=_texts(ours.get("command")) or [],
        job_id=_text(ours.get("job_id")),
        rank=_count(distributed.get("rank")),
        world_size=_count(distributed.get("world_size")),
        framework=_text(ours.get("framework")),
        python_version=_text(ours.get("python_version")),
        threads=threads,
        thread_use=ours["threads"] if isinstance(ours.get("threads"), list) else [],
        kernel_counters=ours["kernel_counters"] if isinstance(ours.get("kernel_counters"), dict) else {},
        settings=_settings(ours.get("settings")),
        labels={str(k): str(v) for k, v in ours["labels"].items()} if isinstance(ours.get("labels"), dict) else {},
        resource=_texts_by_name(ours.get("resource")),
        trace_parent=_text(ours.get("trace_parent")),
        options={names[0]: True for key, names in OPTION_KEYS.items() if value(head, key)},
        activity_types=_texts(ours.get("activity_types")),
        not_recorded=_texts_by_name(ours.get("not_recorded")),
        clock_offset_ns=_whole(ours.get("clock_offset_ns")),
        clock_uncertainty_ns=_whole(ours.get("clock_uncertainty_ns")),
        step_ratio=_ratio(ours.get("step_ratio")),
        least_step_ratio=_ratio(ours.get("least_step_ratio")),
        complete=ours.get("complete") is True,
    )
    return TargetDescription(
        target,
        tuple(item for item in devices if isinstance(item, dict)) if isinstance(devices, list) else (),
        {
            name: number
            for name in head
            if name.endswith("_version") and (number := _count(value(head, name))) is not None
        },
        source_coverage.from_json(ours.get("coverage")),
        told_losses(head),
    )


def told_losses(head: Mapping[str, str]) -> Losses:
    """Returns what was lost before the file was written, as its head states it."""
    ours = value(head, "kinetod")
    ours = ours if isinstance(ours, dict) else {}
    return Losses(**{name: _number(ours.get(key)) for name, key in LOSS_KEYS.items()})


def _settings(found: Any) -> dict[str, bool | int | float | str]:
    values = found.items() if isinstance(found, dict) else ()
    return {str(name): value for name, value in values if isinstance(value, (bool, int, float, str))}


def _texts(found: Any) -> list[str] | None:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        return None
    return found


def _texts_by_name(found: Any) -> dict[str, str]:
    values = found.items() if isinstance(found, dict) else ()
    return {str(name): why for name, why in values if isinstance(why, str)}


def _text(found: Any) -> str:
    return found if isinstance(found, str) else ""


def _whole(found: Any) -> int | None:
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _ratio(found: Any) -> float:
    """Returns a ratio of times, which is 0 if the file has none that makes sense."""
    return float(found) if isinstance(found, (int, float)) and 0 < found < MAX_RATIO else 0.0


def _number(found: Any) -> int:
    """Returns a number of records, which is 0 if the file has none that makes sense."""
    return found if type(found) is int and 0 <= found < 2**62 else 0


def _count(found: Any) -> int | None:
    if isinstance(found, str) and found.isdecimal() and len(found) < 10:
        return int(found)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**31 else None


def _main_pid(loaded: ChromeRows) -> int:
    """Returns the pid of the process with the most host rows."""
    tracks = loaded.tracks
    if not tracks.rows.any():
        return 0
    pids, places = np.unique(tracks.pid[tracks.host], return_inverse=True)
    return int(pids[np.argmax(np.bincount(places, tracks.rows[tracks.host]))])


def _names(loaded: ChromeRows, pid: int) -> tuple[str, dict[int, str]]:
    """Returns the name of the process, and the names of its threads by number."""
    process, threads = "", {}
    numbers = {int(t): int(n) for t, n in zip(loaded.tracks.tid, loaded.tracks.thread, strict=True) if t > TEXT_ID}
    for name, tid, text in _metadata(loaded, pid):
        if name == "process_name":
            process = text
        elif tid in numbers or tid <= TEXT_ID or 0 <= tid < MADE_UP:
            found = _THREAD.match(text)
            number = numbers.get(tid, tid)
            if number > 0:
                threads[number] = found[1] if found else text
    return process, threads


def _metadata(loaded: ChromeRows, pid: int) -> list[tuple[str, int, str]]:
    """Returns (kind of row, tid, text) for the metadata rows that name the process and its threads."""
    table = loaded.tables.get("other")
    if table is None or not table.origin:
        return []
    strings = loaded.strings
    wanted = [number for number, text in enumerate(strings) if text in ("process_name", "thread_name")]
    chosen = (table["phase"] == ord("M")) & np.isin(table["name"], wanted) & (table.origin["pid"] == pid)
    rows = np.flatnonzero(chosen)[:MAX_METADATA_ROWS]
    return [(strings[table["name"][row]], int(table.origin["tid"][row]), _named(table, strings, row)) for row in rows]


def _named(table: Table, strings: list[str], row: int) -> str:
    number = int(table.origin["args"][row])
    if number < 0:
        return ""
    try:
        return _text(_NAME.decode(("{" + strings[number] + "}").encode()).get("name"))
    except (msgspec.DecodeError, UnicodeEncodeError):
        return ""
