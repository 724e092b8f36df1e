"""Where a trace comes from: its rank, its process and its capture, as it says itself, told from its head alone."""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kineto_trace.errors import TraceError
from kineto_trace.open.local_traces import HEAD_BYTES, PACKED_HEAD_BYTES, unpacked_head
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY
from kineto_trace.store.upload_manifest import FLEET_LABEL

_DISTRIBUTED = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_KINETOD = re.compile(rb'"kinetod"\s*:\s*(?=\{)')
_HOST = re.compile(rb'"host_name"\s*:\s*"([^"\\]*)"')
_PID = re.compile(rb'"traceEvents"\s*:\s*\[\s*\{[^{}]*?"pid"\s*:\s*(\d{1,18})(?!\d)')
_PERFETTO = re.compile(rb"\x07kinetod\x12[\x80-\xff]{0,4}[\x00-\x7f](?=\{)")  # our text in a Perfetto trace
_PLACES = 16  # that are tried: a file may have thousands, each of which takes a millisecond
_DOWNLOADED = re.compile(r"kineto-(?P<host>.+)-(?P<pid>\d+)-(?P<capture>\d{8}-\d{6}-[\w-]+?)(?:\.\w+)*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOrigin:
    """What a trace says of itself. rank: None if it does not say it.

    process: host and process id; "" if unknown. capture: the id of its capture, which begins with the time, or of the
    capture of several hosts that it belongs to; "" if unknown.
    """

    rank: int | None = None
    process: str = ""
    capture: str = ""


def origin_of(path: Path) -> TraceOrigin:
    """Returns what the trace at this path says in its head, or at the end of a plain file; nothing if it is damaged."""
    try:
        return _of_folder(path) if path.is_dir() else _of_file(path)
    except (OSError, TraceError, ValueError, AttributeError, RecursionError, zlib.error):
        return TraceOrigin()  # whoever opens it says what is wrong


def origin_in(head: bytes, name: str = "") -> TraceOrigin:
    """Returns what the head of a Chrome or Perfetto trace says, and the name that the client gave a downloaded one."""
    target = next(_objects(_PERFETTO, head), {}).get("target")
    if isinstance(target, dict):
        return _of_target(target)
    ours = next(_objects(_KINETOD, head), {})
    capture, labels = ours.get("capture_id"), ours.get("labels")
    host, pid = _HOST.search(head), _PID.search(head)
    process = f"{host[1].decode('utf-8', 'replace')} {int(pid[1])}" if ours and host and pid else ""
    downloaded = _DOWNLOADED.match(name)
    if ours and not process and downloaded:
        process = f"{downloaded['host']} {downloaded['pid']}"
    return TraceOrigin(rank=_rank_in(head), process=process, capture=_capture(capture, labels))


def process_name(host: str, pid: int) -> str:
    """Returns the name of a process; "" if it is not known."""
    return f"{host} {pid}" if host and pid else ""


def _capture(capture: Any, labels: Any) -> str:
    fleet = labels.get(FLEET_LABEL) if isinstance(labels, Mapping) else None
    return next((text for text in (fleet, capture) if isinstance(text, str) and text), "")


def _of_file(path: Path) -> TraceOrigin:
    with path.open("rb") as file:
        packed = file.read(HEAD_BYTES)
        head = unpacked_head(path, packed)
        found = origin_in(head, path.name)
        if found.rank is None and len(packed) == HEAD_BYTES and not packed.startswith(b"\x1f\x8b"):
            file.seek(max(HEAD_BYTES, file.seek(0, 2) - PACKED_HEAD_BYTES))
            return TraceOrigin(rank=_rank_in(file.read()), process=found.process, capture=found.capture)
        return found


def _of_folder(path: Path) -> TraceOrigin:
    from kineto_trace.model.target_info import TargetInfo
    from kineto_trace.store.parquet_folder import TRACE_FILE, is_stored

    for folder in (path, path / COLUMNS_DIRECTORY):
        if is_stored(folder):
            return _of_target(json.loads((folder / TRACE_FILE).read_bytes()).get("target", {}))
    return _of_target(asdict(TargetInfo.read(path)))


def _of_target(values: Mapping[str, Any]) -> TraceOrigin:
    """Returns what the members of target.json say."""
    rank, host, pid = values.get("rank"), values.get("host"), values.get("pid")
    return TraceOrigin(
        rank=rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None,
        process=process_name(host, pid) if isinstance(host, str) and isinstance(pid, int) else "",
        capture=_capture(values.get("capture_id"), values.get("labels")),
    )


def _rank_in(text: bytes) -> int | None:
    for values in _objects(_DISTRIBUTED, text):
        rank = values.get("rank")
        if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0:
            return rank
    return None


def _objects(pattern: re.Pattern[bytes], text: bytes) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects that follow this key, in its first places."""
    for match in islice(pattern.finditer(text), _PLACES):
        try:
            values, _ = json.JSONDecoder().raw_decode(text[match.end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield values
