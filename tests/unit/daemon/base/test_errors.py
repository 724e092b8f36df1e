import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from kinetod.base import errors
from kinetod.rpc.error_status import STATUS_CODES, to_status

REPOSITORY = Path(__file__).parents[4]
DOCUMENT = (REPOSITORY / "docs/errors.md").read_text()


def section(title: str) -> str:
    return DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0]


def documented(title: str) -> list[str]:
    return re.findall(r"^\| `([A-Z_]+)` \|", section(title), re.MULTILINE)


def test_every_error_class_has_a_status_code() -> None:
    assert set(STATUS_CODES) == set(errors.KinetodError.__subclasses__())


@pytest.mark.parametrize("reason", list(errors.Reason))
def test_every_reason_is_documented_with_its_status(reason: errors.Reason) -> None:
    (row,) = (line for line in section("Refused calls").splitlines() if line.startswith(f"| `{reason}` |"))
    assert row.split(" | ")[1] in {code.name for code in STATUS_CODES.values()} | {"INTERNAL"}


def test_no_reason_is_documented_that_does_not_exist() -> None:
    assert documented("Refused calls") == [reason.value for reason in errors.Reason]
    assert documented("Verdicts from the daemon") == [reason.value for reason in errors.VerdictReason]


def test_every_reason_code_of_the_agent_is_documented() -> None:
    found = set()
    for path in (REPOSITORY / "agent/kineto_agent").rglob("*.py"):
        text = path.read_text()
        for call in re.findall(r"(?:SourceError|Refusal|Reject|SourcesFailed|Ending|end_as)\(([^()]*)", text):
            found |= set(re.findall(r'"([A-Z][A-Z_]{3,})"', call))
    known = {*documented("Verdicts from the agent"), *documented("Verdicts from the daemon"), "TARGET_EXITING"}
    assert found - known == set()
    assert "NOTHING_TO_RECORD" in found


def test_every_reason_code_of_the_decoder_is_documented() -> None:
    text = (REPOSITORY / "daemon/kineto_trace/errors.py").read_text()
    text += (REPOSITORY / "daemon/kineto_trace/conversion/worker_job.py").read_text()
    found = set(re.findall(r'"?reason_code"?\s*[:=] "([A-Z_]+)"', text))
    sections = ("Verdicts from the agent", "Verdicts from the decoder", "Analyses")
    known = {code for section in sections for code in documented(section)}
    assert found - known == set()
    assert "UNKNOWN_LAYOUT" in found


def test_a_status_carries_one_error_info() -> None:
    error = errors.NotFound(errors.Reason.NO_SUCH_PROCESS, "there is no process 7", pid=7)
    status = to_status(error)
    assert (status.code, status.details) == (grpc.StatusCode.NOT_FOUND, "there is no process 7")
    ((key, value),) = status.trailing_metadata
    assert key == "grpc-status-details-bin"
    (detail,) = status_pb2.Status.FromString(value).details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == ("kineto", "NO_SUCH_PROCESS", {"pid": "7"})
