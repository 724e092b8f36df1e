"""Jobs are computed once, remembered, and do not hold up pages."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kinetoctl.web.analyses import analysis_queue, worker_main
from kinetoctl.web.analyses.analysis_queue import (
    FAILURE_S,
    AnalysisFailed,
    AnalysisQueue,
    Computing,
    ResultCache,
    TooBusy,
    WorkerLimits,
    WorkerProcess,
    answered,
)
from support.trace_files import synthetic
from support.waiting import scaled


class Worker:
    """Answers when it may. asked: the jobs that it was given."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.may_answer = threading.Event()

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.may_answer.set()

    def ask(self, job: Any) -> Any:
        self.asked.append(job)
        assert self.may_answer.wait(scaled(20))
        if job.get("fails"):
            raise AnalysisFailed("it did not work")
        return [job["job"]]


def test_a_page_does_not_wait_for_long_and_finds_the_result_later() -> None:
    worker = Worker()
    with AnalysisQueue(WorkerLimits(), workers=[worker]) as queue:
        for _ in range(3):
            with pytest.raises(Computing):
                queue.result("file", {"job": "a"}, wait_s=0.01)
        worker.may_answer.set()
        assert queue.result("file", {"job": "a"}, wait_s=scaled(20)) == ["a"]
        assert queue.result("file", {"job": "a"}, wait_s=0) == ["a"]
        assert worker.asked == [{"job": "a"}]


def test_another_file_or_option_is_another_result() -> None:
    worker = Worker()
    worker.may_answer.set()
    with AnalysisQueue(WorkerLimits(), workers=[worker]) as queue:
        for of, job in (("file", {"job": "a"}), ("changed", {"job": "a"}), ("file", {"job": "a", "limit": 1})):
            queue.result(of, job, wait_s=scaled(20))
        assert len(worker.asked) == 3


def test_a_failure_is_told_again_for_a_while_and_then_tried_again() -> None:
    worker, now = Worker(), [0.0]
    worker.may_answer.set()
    with AnalysisQueue(WorkerLimits(), workers=[worker], clock=lambda: now[0]) as queue:
        for at in (0.0, FAILURE_S - 1, FAILURE_S + 1):
            now[0] = at
            with pytest.raises(AnalysisFailed, match="it did not work"):
                queue.result("file", {"job": "a", "fails": True}, wait_s=scaled(20))
        assert len(worker.asked) == 2


def test_only_so_many_results_are_waited_for() -> None:
    worker = Worker()
    with AnalysisQueue(WorkerLimits(), workers=[worker]) as queue:
        for number in range(analysis_queue.MAX_WAITING):
            with pytest.raises(Computing):
                queue.result("file", {"job": str(number)}, wait_s=0)
        with pytest.raises(TooBusy):
            queue.result("file", {"job": "one more"}, wait_s=0)


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    cache = ResultCache(max_bytes=10)
    for key in ("a", "b"):
        cache.keep(key, key, 5)
    assert cache.find("a") == "a"
    cache.keep("c", "c", 5)
    assert [cache.find(key) for key in ("a", "b", "c")] == ["a", None, "c"]
    cache.keep("d", "d", 11)
    assert [cache.find(key) for key in ("a", "c", "d")] == ["a", "c", None]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.json"
    path.write_text(synthetic.text(2_000))
    return str(path)


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    made = WorkerProcess(WorkerLimits())
    yield made
    made.close()


def test_a_worker_that_died_is_replaced(worker: WorkerProcess, trace: str) -> None:
    job = {"job": "ranks", "paths": [trace]}
    assert worker.ask(job) == [{"rank": 0, "name": "trace.json"}]
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert worker.ask(job) == [{"rank": 0, "name": "trace.json"}]


def test_a_worker_starts_without_duckdb_and_reads_columns_with_the_fast_allocator(
    worker: WorkerProcess, trace: str
) -> None:
    assert worker.ask({"job": "ranks", "paths": [trace]})
    assert worker._process is not None
    process = Path(f"/proc/{worker._process.pid}")
    maps = (process / "maps").read_text()
    assert "pyarrow" in maps
    assert not any(name in maps for name in ("duckdb", "pandas"))
    assert b"ARROW_DEFAULT_MEMORY_POOL=system" in (process / "environ").read_bytes().split(b"\0")
    assert worker.ask({"job": "query", "sql": "SELECT 1 AS one", "paths": [trace]})[0]["rows"] == [{"one": 1}]


def test_what_a_trace_or_a_question_is_wrong_with_is_said(worker: WorkerProcess, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    for job, text in (
        ({"job": "views", "names": ["kernels"], "paths": [str(bad)]}, "bad.json"),
        ({"job": "views", "names": ["no_such"], "paths": [str(bad)]}, "no_such"),
        ({"job": "ranks", "paths": [str(tmp_path / "gone")]}, "does not exist"),
    ):
        with pytest.raises(AnalysisFailed, match=text):
            worker.ask(job)


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_and_the_next_one_runs(trace: str) -> None:
    worker = WorkerProcess(WorkerLimits(job_s=1))
    endless = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range % 7 = 3"
    try:
        name = Path(trace).name
        with pytest.raises(AnalysisFailed, match=f"of {name} took longer than 1 s .* --worker-time"):
            worker.ask({"job": "query", "sql": endless, "paths": [trace]})
        worker._limits = WorkerLimits()  # the next one ends by itself, however busy the machine is
        assert worker.ask({"job": "ranks", "paths": [trace]})
    finally:
        worker.close()


@pytest.mark.slow
def test_a_job_that_needs_too_much_memory_fails_alone(trace: str) -> None:
    worker = WorkerProcess(WorkerLimits(memory_bytes=512 << 20))
    large = "SELECT list(a.range) FROM range(400000000) a"
    try:
        with pytest.raises(AnalysisFailed, match=r"(?i)memory"):
            worker.ask({"job": "query", "sql": large, "paths": [trace]})
        assert worker.ask({"job": "ranks", "paths": [trace]})
    finally:
        worker.close()


def test_a_worker_that_was_closed_does_not_start_again() -> None:
    worker = WorkerProcess(WorkerLimits())
    worker.close()
    with pytest.raises(AnalysisFailed, match="shutting down"):
        worker.start()
    assert worker._process is None


def answer_to_a_job(pieces: Sequence[bytes], pause_s: float = 0.0, job_s: int = 60) -> None:
    """Has `answered` get these bytes from a worker, which must be ended then. Raises AnalysisFailed."""
    ours, theirs = socket.socketpair()
    ended: list[bool] = []

    def answer() -> None:
        with theirs, contextlib.suppress(OSError):
            worker_main.receive(theirs)
            for piece in pieces:
                theirs.sendall(piece)
                time.sleep(pause_s)

    thread = threading.Thread(target=answer)
    thread.start()
    ours.settimeout(job_s)
    try:
        with ours:
            answered(ours, {"job": "ranks"}, WorkerLimits(job_s=job_s), lambda: ended.append(True))
    finally:
        thread.join()
        assert ended == [True]


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b"1", b"null", b"[]", b"{}", b'"failure"', b"\xff", b'{"value":' + b"9" * 5_000 + b"}"]
)
def test_a_worker_whose_answer_is_none_is_ended(text: bytes) -> None:
    with pytest.raises(AnalysisFailed, match="or gave an invalid answer"):
        answer_to_a_job([len(text).to_bytes(8, "big") + text])


def test_a_worker_whose_answer_drips_is_ended_at_the_deadline() -> None:
    text = json.dumps({"value": "x" * 15}).encode()
    drops = [bytes([byte]) for byte in len(text).to_bytes(8, "big") + text]
    with pytest.raises(AnalysisFailed, match="took longer than 1 s and was stopped"):
        answer_to_a_job(drops, 0.05, job_s=1)
