"""Jobs are computed once, remembered, and do not hold up pages."""

import threading
from typing import Any

import pytest
from kinetoctl.web.analyses import analysis_queue
from kinetoctl.web.analyses.analysis_queue import FAILURE_S, AnalysisQueue, Computing, ResultCache, TooBusy
from kinetoctl.web.analyses.worker_process import AnalysisFailed, WorkerLimits
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
