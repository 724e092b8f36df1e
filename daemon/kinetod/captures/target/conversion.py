"""Turns a target's folder into verified files and a summary, without trusting the decode worker's answer."""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.model.target_info import MAX_RATIO
from kineto_trace.store.output_formats import STORED_NAMES

from kinetod.base.errors import VerdictReason
from kinetod.base.safe_text import clean
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.target.services import Services
from kinetod.store.path_guard import file_digest

_INT64_MAX = 2**63 - 1
_MAX_WARNINGS = 32
RAW_FOLDER = "raw"  # name in a target's folder
INFO_FILE = "target.json"
_FILE_NAME = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Converted:
    """The decoded files on disk, verified."""

    files: tuple[pb.TraceFile, ...]
    summary: pb.Summary
    warnings: tuple[str, ...]
    unreadable: int  # records that could not be decoded
    cut: tuple[str, ...]  # files that are incomplete, for people

    def apply(self, target: pb.Target) -> None:
        """Adds files, summary and warnings to the public state."""
        target.files.extend(self.files)
        target.summary.CopyFrom(self.summary)
        target.warnings.extend(self.warnings)


async def convert(services: Services, target_dir: Path, formats: Sequence[str], *, pid: int) -> Converted:
    """Decodes in a worker and verifies its files. Raises DecodeError, after which only the raw records remain."""
    try:
        answer = await services.workers.convert(target_dir, formats, deadline_ns=services.config.decode_deadline_ns)
        return await services.files.in_thread(checked, answer, target_dir, tuple(formats), services.host, pid)
    except DecodeError as exc:
        if await services.files.in_thread(remove_outputs, target_dir):
            raise
        raise DecodeError(VerdictReason.STORE_IO, f"{target_dir} was removed before it was decoded") from exc


def remove_outputs(target_dir: Path) -> bool:
    """Deletes a failed decoder's output. Returns whether the raw records still exist."""
    with contextlib.suppress(OSError):
        for entry in list(target_dir.iterdir()):
            if entry.name in (RAW_FOLDER, INFO_FILE):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    return (target_dir / RAW_FOLDER).is_dir()


def checked(answer: Mapping[str, Any], target_dir: Path, formats: tuple[str, ...], host: str, pid: int) -> Converted:
    """Verifies a worker's answer against the files and gives them the names that clients should use."""
    try:
        files = tuple(
            pb.TraceFile(format=format_, name=name, size_bytes=size, sha256=digest)
            for format_, name, size, digest in answer["files"]
        )
        # protobuf raises SystemError for half a surrogate pair
        json.dumps(answer["summary"], ensure_ascii=False).encode()
        summary = json_format.ParseDict(answer["summary"], pb.Summary(), ignore_unknown_fields=True)
        unreadable = _count(answer["records_undecoded"])
        warnings = tuple(clean(str(warning), 500) for warning in answer["warnings"][:_MAX_WARNINGS])
        cut = tuple(clean(str(problem), 300) for problem in answer["cut"][:_MAX_WARNINGS])
        traced = bool(answer["traced"])
    except (KeyError, TypeError, ValueError, RecursionError, json_format.ParseError) as exc:
        raise DecodeError(VerdictReason.DECODE_FAILED, f"the decoder's answer is invalid: {exc}") from exc
    missing = set(formats) - {file.format for file in files}
    if traced and missing:
        raise DecodeError(VerdictReason.DECODE_FAILED, f"the decoder wrote no {', '.join(sorted(missing))} file")
    for file in files:
        _verify(file, target_dir)
    # Clients get a name with host and process, in the form that TensorBoard's plug-in expects.
    stem = f"{_FILE_NAME.sub('_', host)}_{pid}.{time.time_ns() // 10**6}.pt"
    for file in files:
        file.name = f"{stem}.{STORED_NAMES[file.format]}"
        file.verified_ns = time.time_ns()
    return Converted(files, summary, warnings, unreadable, cut)


def _count(value: Any) -> int:
    """Checks a count. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= _INT64_MAX:
        raise ValueError(f"{value!r:.80} is not a valid number of records")
    return value


def _verify(file: pb.TraceFile, target_dir: Path) -> None:
    if file.format not in STORED_NAMES:
        raise DecodeError(VerdictReason.DECODE_FAILED, f"the decoder wrote an unknown format {file.format!r:.40}")
    path = target_dir / STORED_NAMES[file.format]
    try:
        size, digest = file_digest(path)
    except OSError as exc:
        raise DecodeError(VerdictReason.FILE_DAMAGED, f"{path} cannot be read back: {exc.strerror}") from exc
    if (size, digest) != (file.size_bytes, file.sha256):
        raise DecodeError(VerdictReason.FILE_DAMAGED, f"{path} differs from what was written; check the disk")


def overhead_of(values: Mapping[str, Any]) -> pb.Overhead:
    """The agent's own overhead figures, without implausible values."""
    overhead = pb.Overhead()
    for name in ("start_ns", "stop_ns", "detach_ns", "agent_cpu_ns"):
        value = values.get(name)
        if isinstance(value, int) and 0 <= value <= _INT64_MAX:
            setattr(overhead, name, int(value))
    for name in ("step_ratio", "least_step_ratio"):
        ratio = values.get(name)
        if isinstance(ratio, (int, float)) and 0 < ratio < MAX_RATIO:
            setattr(overhead, name, float(ratio))
    return overhead
