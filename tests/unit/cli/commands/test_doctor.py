"""`kinetoctl doctor` against a scripted daemon, and `kinetoctl explain` without one."""

import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import grpc
import pytest
import yaml
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.base import reason_codes
from kinetoctl.output.diagnosis import print_checks, process_title, verdict
from kinetod.base.errors import Reason, VerdictReason
from support.service import captures
from support.service.cli import Result, Run, run_here
from support.service.fake_profiler import Abort, FakeServer

Explain = Callable[..., Result]
NOWHERE = "unix:/nowhere"


def good() -> pb.Diagnosis:
    checks = [
        pb.Check(name="process", status=pb.CHECK_STATUS_OK, detail="python, state S"),
        pb.Check(name="cuda", status=pb.CHECK_STATUS_NOTE, detail="not loaded"),
        pb.Check(name="method", status=pb.CHECK_STATUS_OK, detail="pending-call: …"),
    ]
    return pb.Diagnosis(process=captures.process(), method="pending-call", checks=checks)


def bad() -> pb.Diagnosis:
    checks = [
        pb.Check(name="process", status=pb.CHECK_STATUS_OK, detail="python, state S"),
        pb.Check(
            name="tracer", status=pb.CHECK_STATUS_PROBLEM, detail="strace (pid 7) traces it", advice="end that tool"
        ),
        pb.Check(name="seccomp", status=pb.CHECK_STATUS_UNKNOWN, detail="?"),
        pb.Check(name="method", status=pb.CHECK_STATUS_PROBLEM, detail="none"),
    ]
    return pb.Diagnosis(process=captures.process(), checks=checks)


def test_a_process_that_can_be_traced_is_code_0(server: FakeServer, run: Run) -> None:
    server.profiler.diagnosis = good()
    result = run("doctor", "4242")
    assert server.profiler.requests == [pb.DiagnoseProcessRequest(pid=4242)]
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout == (
        "process 4242 of ada: python train.py --epochs 3\n"
        "CHECK    STATUS  DETAIL\n"
        "process  OK      python, state S\n"
        "cuda     NOTE    not loaded\n"
        "method   OK      pending-call: …\n"
        "process 4242 can be traced (pending-call)\n"
    )


def test_a_process_that_cannot_be_traced_is_code_5_and_says_what_to_do(server: FakeServer, run: Run) -> None:
    server.profiler.diagnosis = bad()
    result = run("doctor", "4242")
    assert result.code == 5
    assert result.stdout == (
        "process 4242 of ada: python train.py --epochs 3\n"
        "CHECK    STATUS   DETAIL\n"
        "process  OK       python, state S\n"
        "tracer   PROBLEM  strace (pid 7) traces it\n"
        "                  → end that tool\n"
        "seccomp  UNKNOWN  ?\n"
        "method   PROBLEM  none\n"
        "process 4242 cannot be traced: tracer\n"
    )


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_in_json_and_yaml_it_is_the_message_and_the_same_code(server: FakeServer, run: Run, form: str) -> None:
    server.profiler.diagnosis = bad()
    result = run("doctor", "4242", "-o", form)
    document = yaml.safe_load(result.stdout)  # JSON is YAML
    assert result.code == 5
    assert document["method"] == ""
    assert document["process"]["pid"] == 4242
    assert document["checks"][1] == {
        "name": "tracer",
        "status": "CHECK_STATUS_PROBLEM",
        "detail": "strace (pid 7) traces it",
        "advice": "end that tool",
    }


@pytest.mark.parametrize(
    ("abort", "code"),
    [
        (Abort(grpc.StatusCode.NOT_FOUND, "there is no process 7", "NO_SUCH_PROCESS"), 3),
        (Abort(grpc.StatusCode.PERMISSION_DENIED, "it belongs to ada", "NOT_YOUR_PROCESS"), 6),
        (Abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method"), 5),
    ],
)
def test_errors_have_their_own_codes(server: FakeServer, run: Run, abort: Abort, code: int) -> None:
    server.profiler.diagnosis = abort
    result = run("doctor", "7")
    assert (result.code, result.stdout) == (code, "")


@pytest.mark.parametrize("pid", ["0", "-3", "x", "99999999999"])
def test_what_is_no_pid_is_refused_before_the_daemon_is_asked(server: FakeServer, run: Run, pid: str) -> None:
    assert run("doctor", "--", pid).code == 2
    assert server.profiler.requests == []


def test_in_a_terminal_long_texts_are_wrapped_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "60")
    words = [f"word{number}" for number in range(40)]
    diagnosis = bad()
    diagnosis.checks[1].advice = " ".join(words)
    print_checks(process_title(diagnosis), diagnosis.checks, verdict(diagnosis), color=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(map(len, text.splitlines())) <= 60
    assert text.split()[-4:] == ["cannot", "be", "traced:", "tracer"]
    assert all(word in text for word in words)


def test_the_verdict_without_any_known_problem() -> None:
    assert verdict(pb.Diagnosis(process=pb.Process(pid=7))) == "process 7 cannot be traced: no method works"


def host(*problems: str) -> pb.HostDiagnosis:
    checks = [
        pb.Check(name="clock", status=pb.CHECK_STATUS_NOTE, detail="not synchronised", advice="start chrony"),
        *(pb.Check(name=name, status=pb.CHECK_STATUS_PROBLEM, detail="no") for name in problems),
    ]
    return pb.HostDiagnosis(hostname="gpu-7", checks=checks)


def test_without_a_pid_the_host_is_looked_at(server: FakeServer, run: Run) -> None:
    server.profiler.host_diagnosis = host()
    result = run("doctor")
    assert server.profiler.requests == [pb.DiagnoseHostRequest()]
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout == (
        "host gpu-7\n"
        "CHECK  STATUS  DETAIL\n"
        "clock  NOTE    not synchronised\n"
        "               → start chrony\n"
        "nothing on gpu-7 prevents tracing\n"
    )


def test_a_host_with_problems_is_code_5_and_names_them(server: FakeServer, run: Run) -> None:
    server.profiler.host_diagnosis = host("store", "units", "store")
    result = run("doctor")
    assert (result.code, result.stdout.splitlines()[-1]) == (5, "problems on gpu-7: store, units")
    assert [check["name"] for check in run("doctor", "-o", "json").json()["checks"]] == [
        *("clock", "store", "units", "store")
    ]


def test_host_shows_the_checks_below_its_figures(server: FakeServer, run: Run) -> None:
    server.profiler.host = pb.Host(hostname="gpu-7")
    server.profiler.host_diagnosis = host("store")
    result = run("host")
    assert result.code == 0
    assert result.stdout.splitlines()[-1] == "problems on gpu-7: store"
    assert run("host", "-o", "json").json()["checks"][1]["name"] == "store"


def test_a_daemon_older_than_the_checks_still_shows_its_host(server: FakeServer, run: Run) -> None:
    server.profiler.host = pb.Host(hostname="gpu-7")
    server.profiler.host_diagnosis = Abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
    assert (run("host").code, run("host", "-o", "json").json()["checks"]) == (0, [])
    assert run("doctor").code == 5


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    return lambda *arguments: run_here(capsys, NOWHERE, "explain", *arguments)


def test_a_code_is_explained_with_its_remedy_without_a_daemon(explain: Explain) -> None:
    result = explain("RECORDS_DROPPED")
    assert result.code == 0
    assert result.stdout.splitlines() == [
        "RECORDS_DROPPED: buffers were full and records were lost",
        "  What to do: use a larger `--buffer-limit`, a shorter `--duration`, or fewer `--activities`",
        "  Where: verdicts from the daemon: PARTIAL",
    ]


def test_a_code_that_comes_from_several_places_has_all_its_rows(explain: Explain) -> None:
    rows = explain("busy", "-o", "json").json()
    assert [(row["code"], row["status"]) for row in rows] == [("BUSY", "FAILED_PRECONDITION"), ("BUSY", "FAILED")]


def test_a_mistyped_code_is_answered_with_those_that_are_like_it(explain: Explain) -> None:
    result = explain("records_droped")
    assert result.code == 2
    assert "there is no reason code 'records_droped'; did you mean RECORDS_DROPPED" in result.stderr


def test_an_empty_code_is_no_code(explain: Explain) -> None:
    result = explain("")
    assert (result.code, result.stdout) == (2, "")
    assert "there is no reason code ''" in result.stderr


def test_every_reason_code_of_the_daemon_is_explained(explain: Explain) -> None:
    known = {row.code for row in reason_codes.explanations() if row.meaning}
    assert {*map(str, Reason), *map(str, VerdictReason)} <= known
    listed = explain().stdout
    assert all(code in listed for code in known)


def test_an_installation_without_the_document_says_so(
    explain: Explain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reason_codes, "_PLACES", (tmp_path / "errors.md",))
    result = explain("BUSY")
    assert result.code == 3
    assert f"{tmp_path / 'errors.md'} is missing: reinstall kinetod" in result.stderr
    assert not reason_codes.is_explained("BUSY")
