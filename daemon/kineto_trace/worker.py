"""A warm worker: `python -m kineto_trace.worker` converts targets, one JSON line per job, until end of input.

Theory of operation
    A job is {"id", "target_dir", "formats"} on standard input, its answer one line on what was standard
    output at the start: {"id", "ok": true, "conversion": {…}} or {"id", "ok": false, "reason_code",
    "reason"}. Anything else that is printed in here goes to standard error. What takes long to import is
    imported before the first job. The caller has the deadline: a worker that hangs is killed, one that
    crashed is replaced, and the job's files are then still whole or absent.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from kineto_trace.codec import Interner
from kineto_trace.convert import convert_target
from kineto_trace.errors import TraceError


def main() -> int:
    """Serves standard input. Returns the exit status."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    _warm_up()
    return serve(sys.stdin, answers)


def serve(jobs: TextIO, answers: TextIO) -> int:
    """Answers every line of `jobs` with one line."""
    for line in jobs:
        if line.strip():
            answers.write(json.dumps(_answer(line)) + "\n")
            answers.flush()
    return 0


def _warm_up() -> None:
    """Loads the native library, so that a missing one is seen in the log at once; a job then tells the caller."""
    try:
        Interner()
    except TraceError as exc:
        sys.stderr.write(f"{exc}\n")


def _answer(line: str) -> dict[str, Any]:
    job_id: Any = None
    try:
        job = json.loads(line)
        job_id = job["id"]
        conversion = convert_target(Path(job["target_dir"]), formats=[str(name) for name in job["formats"]])
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


if __name__ == "__main__":
    sys.exit(main())
