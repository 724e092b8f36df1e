"""`kinetoctl explain`: reason codes, what they mean and what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kinetoctl.base import reason_codes
from kinetod.base.errors import Reason, VerdictReason
from support.service.cli import Result, run_here

Explain = Callable[..., Result]
NOWHERE = "unix:/nowhere"


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    return lambda *arguments: run_here(capsys, NOWHERE, "explain", *arguments)


def test_a_code_is_explained_with_its_remedy_without_a_daemon(explain: Explain) -> None:
    result = explain("RECORDS_DROPPED")
    assert result.code == 0
    assert result.stdout.splitlines() == [
        "RECORDS_DROPPED (PARTIAL): verdicts from the daemon",
        "  buffers were full and records were lost",
        "  What to do: use a larger `--buffer-limit`, a shorter `--duration`, or fewer `--activities`",
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
