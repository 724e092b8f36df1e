"""The decode worker as a process of its own: real records through the whole sandbox."""

import json
import subprocess
from pathlib import Path
from typing import Any

from kineto_trace.conversion.target_conversion import FORMATS
from kinetod.supervise import child
from support.trace_files.h200 import RECORDINGS, make_spool
from support.waiting import scaled


def converse(*jobs: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The answers, and what was said on standard error."""
    limits = {"memory_bytes": 1 << 30, "cpu_s": 60, "required": True}
    lines = "".join(json.dumps({**job, **limits}) + "\n" for job in jobs)
    done = subprocess.run(
        child.python("kinetod.captures.result.decode_worker"),
        input=lines,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_real_records_are_decoded_in_the_sandbox(tmp_path: Path) -> None:
    for name in RECORDINGS:
        (tmp_path / name).mkdir()
        make_spool(tmp_path / name, name)
    jobs = [{"id": name, "target_dir": str(tmp_path / name), "formats": list(FORMATS)} for name in RECORDINGS]
    answers, said = converse(*jobs)
    assert ([(answer["id"], answer["ok"]) for answer in answers], said) == ([(name, True) for name in RECORDINGS], "")
    for answer in answers:
        made = {path.name for path in (tmp_path / answer["id"]).iterdir()}
        assert {file[1] for file in answer["conversion"]["files"]} < made


def test_a_worker_has_one_thread_and_no_pandas_when_it_forks(tmp_path: Path) -> None:
    with subprocess.Popen(
        child.python("kinetod.captures.result.decode_worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        job = {"id": 1, "target_dir": str(tmp_path), "formats": [], "memory_bytes": 1 << 30, "cpu_s": 60}
        worker.stdin.write(json.dumps({**job, "required": False}) + "\n")
        worker.stdin.flush()
        worker.stdout.readline()  # it is warm
        assert len(list(Path(f"/proc/{worker.pid}/task").iterdir())) == 1
        assert "/pyarrow/" in (mapped := Path(f"/proc/{worker.pid}/maps").read_text())
        assert "/pandas/" not in mapped


def test_a_worker_answers_job_after_job_and_ends_with_its_input(tmp_path: Path) -> None:
    make_spool(tmp_path, "graph-cupti26")
    answers, _ = converse(
        {"id": 1, "target_dir": str(tmp_path / "none"), "formats": []},
        {"id": 2, "target_dir": str(tmp_path), "formats": ["chrome"]},
    )
    assert [(each["id"], each["ok"]) for each in answers] == [(1, False), (2, True)]
    assert answers[0]["reason_code"] == "SPOOL_INVALID"
