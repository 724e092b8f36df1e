"""The audit of what is pinned: what it says where advisories are, and where there are none."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pinned import audit
from pinned.advisories import answer, by_package


def record(name: str, *events: dict[str, str], **more: Any) -> dict[str, Any]:
    """An advisory as OSV exports it."""
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}] if events else []
    affected = {"package": {"name": name, "ecosystem": "PyPI"}, "ranges": ranges}
    return {"id": "PYSEC-2026-1", "modified": "2026-10-01T00:00:00Z", "affected": [affected]} | more


def folder(place: Path, *several: dict[str, Any]) -> Path:
    """A folder of advisories."""
    for number, each in enumerate(several):
        (place / f"{number}.json").write_text(json.dumps(each))
    return place


def lock(place: Path) -> Path:
    """A lock of two packages."""
    path = place / "lock.txt"
    path.write_text("".join(f"{pin} \\\n    --hash=sha256:{'0' * 64}\n" for pin in ("jinja2==3.1.6", "six==1.17.0")))
    return path


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.9", False), ("1.0", True), ("1.9.1", True), ("2.0rc1", True), ("2.0", False), ("3.2", True), ("3.3", False)],
)
def test_a_range_holds_from_its_beginning_to_before_its_fix(tmp_path: Path, version: str, known: bool) -> None:
    ends = ({"introduced": "1.0"}, {"fixed": "2.0"}, {"introduced": "3.0"}, {"last_affected": "3.2"})
    advisories = by_package(folder(tmp_path, record("Some.Name", *ends)))
    assert bool(answer(advisories, "some-name", version)) is known


def test_a_version_that_is_listed_counts_and_what_was_withdrawn_does_not(tmp_path: Path) -> None:
    listed = record("six")
    listed["affected"][0]["versions"] = ["1.17.0"]
    advisories = by_package(
        folder(tmp_path, listed, record("click", {"introduced": "0"}, withdrawn="2026-10-02T00:00:00Z"))
    )
    assert answer(advisories, "six", "1.17.0")["vulns"] == [listed]
    assert answer(advisories, "six", "1.16.0") == answer(advisories, "click", "8.0") == {}


def test_what_is_known_is_named_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("1.json", json.dumps(record("Jinja2", {"introduced": "0"}, {"fixed": "3.1.7"})))
    assert audit.main(["--advisories", str(tmp_path), str(lock(tmp_path))]) == audit.SOMETHING_KNOWN
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}: 1 advisories, the newest of 2026-10-01",
        "lock.txt: jinja2 3.1.6: PYSEC-2026-1, fixed in 3.1.7",
        "lock.txt: 2 packages looked up, 1 known vulnerabilities",
    ]


@pytest.mark.slow
def test_nothing_known_ends_with_0_once_every_package_was_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path, record("jinja2", {"introduced": "0"}, {"fixed": "3.0"}))
    assert audit.main(["--advisories", str(tmp_path), str(lock(tmp_path))]) == audit.NOTHING_KNOWN
    assert capsys.readouterr().out.splitlines()[1:] == ["lock.txt: 2 packages looked up, 0 known vulnerabilities"]


def test_a_folder_without_advisories_is_no_clean_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--advisories", str(tmp_path), str(lock(tmp_path))]) == audit.NOT_CHECKED
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"NOT CHECKED for vulnerabilities: {tmp_path} holds no advisory")


@pytest.mark.parametrize(
    ("service", "why"),
    [
        ('raise SystemExit("no such host")', "the advisory service did not answer: no such host"),
        ('print(\'{"dependencies": [{"name": "jinja2", "vulns": []}, {"name": "six", "skip_reason": "?"}]}\')',
         "the advisory service has no answer about six"),
        ('print(\'{"dependencies": []}\')', "the advisory service has no answer about jinja2, six"),
    ],
)  # fmt: skip
def test_a_service_that_does_not_answer_about_each_package_is_no_clean_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: str, why: str
) -> None:
    (tmp_path / "pip_audit.py").write_text(service)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(audit.VARIABLE, raising=False)
    assert audit.main([str(lock(tmp_path))]) == audit.NOT_CHECKED
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"NOT CHECKED for vulnerabilities: {why}\n")
