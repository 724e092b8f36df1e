"""One job of a decode worker: a line of JSON in, a line of JSON out, whatever happens.

A job is {"id", "target_dir", "formats"}; its answer {"id", "ok": true, "conversion": {…}} or {"id", "ok": false,
"reason_code", "reason"}. Another kind of job is {"id", "traces": [folder, …]}, the decoded targets of a capture. Its
answer is {"id", "ok": true, "answer": {"verdict", "cause"}}, as a report about them begins. All other output goes to
standard error. The caller has the deadline and confines the process: one that is killed leaves the job's files complete
or absent.

A warm-up before the first job takes the one-time costs of a process: late imports, first uses of Arrow.

Each job of a decode worker is the first one of its process. The warm-up of the parent process saves each about 10 ms, a
sixth of the processor time of a small job.
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kineto_trace.arrays import spilled_memory
from kineto_trace.base.atomic_files import is_full
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.decode.cupti_layouts import LAYOUTS
from kineto_trace.decode.cupti_records import FORMAT, kinds_of
from kineto_trace.errors import TraceError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import RawWriter

_BEGIN_NS, _STEP_NS = 1_700_000_000_000_000_000, 1000


def warm_up() -> None:
    """Converts a sample to warm up. A missing native library is logged here, and reported by each job."""
    try:
        convert_a_sample()
    except (OSError, TraceError) as exc:
        sys.stderr.write(f"cannot warm up: {exc}\n")


def answer(line: str) -> str:
    """Does the job described by this line. Never raises."""
    return json.dumps(_answer(line))


def _answer(line: str) -> dict[str, Any]:
    job_id: Any = None
    try:
        job = json.loads(line)
        job_id = job["id"]
        if "traces" in job:
            return {"id": job_id, "ok": True, "answer": _about(job["traces"])}
        target_dir = Path(job["target_dir"])
        spilled_memory.begin(target_dir)
        conversion = convert_target(target_dir, formats=[str(name) for name in job["formats"]])
    except TraceError as exc:
        return {"id": job_id, "ok": False, "reason_code": exc.reason_code, "reason": str(exc)}
    except OSError as exc:
        code = "DISK_FULL" if is_full(exc) else "STORE_IO"
        return {"id": job_id, "ok": False, "reason_code": code, "reason": f"cannot write the trace: {exc}"}
    except MemoryError:
        reason = "not enough memory to decode the trace"
        return {"id": job_id, "ok": False, "reason_code": "OUT_OF_MEMORY", "reason": reason}
    except Exception as exc:  # noqa: BLE001 - one bad job must not end the worker; the log has the details
        traceback.print_exc()
        reason = f"the decoder failed: {type(exc).__name__}: {exc}"
        return {"id": job_id, "ok": False, "reason_code": TraceError.reason_code, "reason": reason}
    return {"id": job_id, "ok": True, "conversion": conversion.to_dict()}


def _about(folders: Sequence[str]) -> dict[str, str]:
    """Returns the answer about these targets. Raises FileError, TraceError."""
    from kineto_trace.catalog.first_screen import first_screen_of  # 200 ms and 40 MB that a decoder does without
    from kineto_trace.catalog.view_runner import SameProcess

    found = first_screen_of([Path(folder) for folder in folders], executor=SameProcess())
    return {"verdict": found.verdict, "cause": found.cause}


def convert_a_sample() -> None:
    """Converts a made-up target with one record of each kind in a temporary folder. Raises OSError, TraceError."""
    with tempfile.TemporaryDirectory(prefix="kineto-warm-") as name:
        folder = Path(name)
        version = max(LAYOUTS)
        with RawWriter(folder / "raw/cupti", source="cupti", format=FORMAT, metadata={"cupti_version": version}) as raw:
            records = _records(version)
            raw.append_buffer(b"".join(records), sequence=0, records=len(records))
            raw.finish(metadata={}, record_bytes={}, records=len(records), dropped=0)
        TargetInfo(capture_id="", host="", pid=1, process_name="").write(folder)
        convert_target(folder, formats=[])


def _records(version: int) -> list[bytes]:
    """Returns one record of each kind, in order of time."""
    written = []
    for number, known in enumerate(kinds_of(LAYOUTS[version])):
        layout = LAYOUTS[version].records[known.layout]
        record = bytearray(layout.size)
        record[:4] = known.kind.to_bytes(4, "little")
        for field, time_ns in (("start", _BEGIN_NS), ("end", _BEGIN_NS + _STEP_NS // 2)):
            if field in layout.offsets:
                at = layout.offsets[field]
                record[at : at + 8] = (time_ns + number * _STEP_NS).to_bytes(8, "little")
        written.append(bytes(record))
    return written
