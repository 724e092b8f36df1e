"""`make rocm`, by which owners of an AMD GPU prove the recording: against the fake, shortened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.service.cli import environment
from support.waiting import scaled

PROVE = Path(__file__).parents[2] / "rocm" / "prove.py"


def report(folder: Path, version: int) -> tuple[int, Any]:
    """Exit status, and the report."""
    path = folder / "report.json"
    short = ("--launches", "1000", "--many", "20000", "--cycles", "2")
    done = subprocess.run(
        [sys.executable, str(PROVE), "--fake", "--version", str(version), *short, "--output", str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(path.read_text())


@pytest.mark.slow
def test_every_check_passes_where_the_trace_says_what_the_program_says(tmp_path: Path) -> None:
    code, found = report(tmp_path, 10305)
    assert (code, found["passed"]) == (0, True), found["text"]
    passed = {check["check"] for check in found["checks"] if check["passed"]}
    assert passed >= {
        "live attach", "live attach: times", "environment", "many launches", "captures in a row", "exit",
        "kinetoctl run", "beside another profiler", "the other profiler", "counters",
    }  # fmt: skip
    assert found["facts"]["fake"] == "rocprofiler-sdk 10305"


@pytest.mark.slow
def test_what_is_refused_is_not_proven(tmp_path: Path) -> None:
    code, found = report(tmp_path, 10302)
    assert (code, found["passed"]) == (1, False)
    assert "FAIL: live attach: not recorded: ROCPROFILER_HANGS" in "\n".join(found["text"])
