"""`kinetoctl report` of memory snapshots: files, and those of captures."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service import captures
from support.service.cli import Result, run_here
from support.service.fake_profiler import FakeProfiler, FakeServer, serve
from support.targets.memory_snapshots import MIB, snapshot, write_snapshot

CAPTURE = "20260101-000000-a"
CONTENT = pickle.dumps(snapshot(), protocol=4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_snapshot(tmp_path / "kineto-gpu7-42-x.memory_snapshot.pickle")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    target = captures.done_target(content=CONTENT)
    target.files[0].format = "memory-snapshot"
    target.files[0].name = "memory_snapshot.pickle"
    found = captures.capture(target)
    found.id = CAPTURE
    with serve(FakeProfiler(content=CONTENT, stored=found)) as running:
        yield running


def report(capsys: pytest.CaptureFixture[str], *arguments: str, address: str = "unix:/nowhere.sock") -> Result:
    return run_here(capsys, address, "report", *arguments)


def test_a_snapshot_gives_its_devices_stacks_and_failures(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, str(file))
    assert (result.code, result.stderr) == (0, "")
    for title in ("snapshot devices\n", "snapshot stacks\n", "snapshot ooms\n", "step (train.py:12)", "45.5%"):
        assert title in result.stdout
    assert "--describe" not in result.stdout


def test_without_failures_there_is_no_table_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_snapshot(tmp_path / "x.pickle", {"segments": []})
    assert "ooms" not in report(capsys, str(file)).stdout


def test_json_is_exact(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(report(capsys, str(file), "-o", "json").stdout)
    assert list(found) == ["snapshot_devices", "snapshot_stacks", "snapshot_ooms"]
    assert found["snapshot_devices"]["rows"][0]["reserved_bytes"] == 22 * MIB


def test_views_columns_and_limits_can_be_chosen(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--view", "snapshot_blocks", "--columns", "state,block_bytes", "--limit", "2", "-o", "csv")
    assert (
        report(capsys, str(file), *chosen).stdout == f"state,block_bytes\nactive,{4 * MIB}\nawaiting free,{2 * MIB}\n"
    )


def test_several_snapshots_are_told_apart(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_snapshot(file.with_name("other.pickle"))
    result = report(capsys, str(file.parent / "*.pickle"), "-o", "json")
    rows = json.loads(result.stdout)["snapshot_devices"]["rows"]
    assert [row["process"] for row in rows] == ["kineto-gpu7-42-x", "other"]


def test_the_snapshot_of_a_capture_is_fetched(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, "--view", "snapshot_devices", "-o", "json", CAPTURE, address=server.address)
    assert json.loads(result.stdout)["snapshot_devices"]["rows"][0]["segments"] == 2


def test_a_capture_without_a_trace_says_how_to_see_its_snapshot(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    result = report(capsys, CAPTURE, address=server.address)
    assert result.code == 3
    assert "has no trace but a memory snapshot: `kinetoctl report --view snapshot_devices" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--view", "snapshot_x"), 2, "a memory snapshot has no view snapshot_x; its views are snapshot_devices"),
        (("--html", "x.html"), 2, "`kinetoctl web FILE` has its charts"),
        (("--set", "a=b"), 2, "a memory snapshot has no --html, --compat or --set"),
        (("--columns", "nothing"), 2, "has no column nothing"),
        (("--view", "kernels"), 5, "is a pickle, not a trace: of a memory snapshot, name snapshots alone"),
    ],
)
def test_what_a_snapshot_has_not_is_said(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = report(capsys, *arguments, str(file))
    assert (result.code, said in result.stderr + result.stdout) == (code, True), result.stderr


def test_a_hostile_pickle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.pickle"
    file.write_bytes(pickle.dumps(print, protocol=4))
    result = report(capsys, str(file))
    assert result.code == 5
    assert "x.pickle is not plain data: it imports something at byte" in result.stderr


def test_a_trace_without_one_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = report(capsys, "--view", "snapshot_devices", str(tmp_path))
    assert (result.code, "there is no memory snapshot at" in result.stderr) == (3, True)
