"""The sample that a decode worker converts before there is a job."""

import subprocess
import sys
from pathlib import Path

import pytest
from kineto_trace.conversion.worker_job import convert_a_sample
from support.trace_files.h200 import make_spool
from support.waiting import scaled

FIRST = """
import json, sys
from kineto_trace.conversion import worker_job
worker_job.warm_up()
before = set(sys.modules)
assert '"ok": true' in worker_job.answer(json.dumps({"id": 1, "target_dir": sys.argv[1], "formats": ["chrome"]}))
print(sorted(set(sys.modules) - before))
"""


def test_the_first_job_of_a_warm_process_imports_nothing(tmp_path: Path) -> None:
    make_spool(tmp_path, "mlp-cupti26")
    done = subprocess.run(
        [sys.executable, "-c", FIRST, str(tmp_path)], capture_output=True, text=True, timeout=scaled(120)
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_sample_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    convert_a_sample()
    assert list(tmp_path.iterdir()) == []
