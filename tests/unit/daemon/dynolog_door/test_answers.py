"""Answers have what dyno and in-house scripts unwrap, and say nothing that was not seen."""

from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import Reason, invalid
from kinetod.dynolog_door import answers, requests
from kinetod.dynolog_door.answers import TraceStarted
from kinetod.dynolog_door.process_matching import MatchedProcesses

NONE = {
    "processesMatched": [], "activityProfilersTriggered": [], "activityProfilersBusy": 0,
    "eventProfilersTriggered": [], "eventProfilersBusy": 0,
}  # fmt: skip


def test_the_state_is_dynologs_number() -> None:
    assert answers.status(healthy=True) == {"status": 1}
    assert answers.status(healthy=False) == {"status": 0}


def test_nothing_is_paused_and_the_answer_says_so_as_dynolog_without_its_gpu_monitor() -> None:
    assert answers.dcgm()["status"] is False


def test_only_what_is_really_traced_is_listed() -> None:
    capture = pb.Capture(id="c")
    capture.targets.add(pid=7)
    capture.targets.add(pid=8, verdict=pb.VERDICT_FAILED, reason_code="ATTACH_SECCOMP", reason="it may not")
    matched = MatchedProcesses(free=(7, 8), busy=2, beyond=5)
    assert answers.started(TraceStarted(matched=matched, capture=capture, log_file="not written: why")) == {
        **NONE,
        "processesMatched": [7],
        "activityProfilersTriggered": [7],
        "activityProfilersBusy": 2,
        "kinetod": {
            "capture": "c",
            "log_file": "not written: why",
            "notes": ["5 more processes match; process_limit (--process-limit) leaves them out"],
            "refused": [{"pid": 8, "reason": "ATTACH_SECCOMP", "message": "it may not"}],
        },
    }
    assert answers.started(TraceStarted(matched=MatchedProcesses())) == NONE


def test_every_refusal_of_a_trace_has_the_list_that_dyno_unwraps() -> None:
    refused = answers.refused(requests.TRACE, invalid("config", "is empty"))
    assert refused == {
        **NONE, "status": "failed: config: is empty",
        "kinetod": {"reason": Reason.INVALID_FIELD, "message": "config: is empty"},
    }  # fmt: skip
    assert answers.wrong_argument(requests.TRACE, "x") == {**NONE, "status": "failed with exception = x"}
    assert answers.internal_error(requests.TRACE).items() >= NONE.items()
    assert answers.wrong_argument(requests.PAUSE, "x") == {"status": "failed with exception = x"}
