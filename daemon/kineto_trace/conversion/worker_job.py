"""One job of a decode worker: a line of JSON in, a line of JSON out, whatever happens.

A job is {"id", "target_dir", "formats"}; its answer {"id", "ok": true, "conversion": {…}} or {"id", "ok": false,
"reason_code", "reason"}. Anything else that is printed in here goes to standard error. The caller has the deadline and
confines the process: one that is killed leaves the job's files whole or absent.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from kineto_trace.arrays import spilled_memory
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.conversion.worker_warm_up import convert_a_sample
from kineto_trace.errors import TraceError


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
        target_dir = Path(job["target_dir"])
        spilled_memory.begin(target_dir)
        conversion = convert_target(target_dir, formats=[str(name) for name in job["formats"]])
    except TraceError as exc:
        return {"id": job_id, "ok": False, "reason_code": exc.reason_code, "reason": str(exc)}
    except OSError as exc:
        return {"id": job_id, "ok": False, "reason_code": "STORE_IO", "reason": f"cannot write the trace: {exc}"}
    except MemoryError:
        return {"id": job_id, "ok": False, "reason_code": "OUT_OF_MEMORY", "reason": "not enough memory to decode"}
    except Exception as exc:  # noqa: BLE001 - one bad job must not end the worker; the log has the details
        traceback.print_exc()
        reason = f"the decoder failed: {type(exc).__name__}: {exc}"
        return {"id": job_id, "ok": False, "reason_code": TraceError.reason_code, "reason": reason}
    return {"id": job_id, "ok": True, "conversion": conversion.to_dict()}
