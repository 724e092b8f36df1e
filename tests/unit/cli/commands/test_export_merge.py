"""`kinetoctl export --merge` over ranks with known clocks."""

import json
from pathlib import Path

import pytest
from kineto_trace.base.quantities import format_duration
from support.service.cli import Run, run_here
from support.trace_files.merging import document, write_job

SKEW_US = (0.0, 1_500.0, -2_750.0)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_here(capsys, "unix:/nowhere.sock", *arguments)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    write_job(folder, SKEW_US)
    return folder


def test_a_merge_tells_how_far_the_clocks_may_be_apart(run: Run, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.json.gz"
    result = run("export", "--merge", str(job), "-o", str(path))
    assert (result.code, result.stderr) == (0, "")
    kept = document(path)["kinetodMerge"]["clock_uncertainty_ns"]
    assert result.stdout.startswith(f"{path} (")
    assert result.stdout.endswith(f"): 3 ranks, with clocks within {format_duration(kept)} of rank 0's\n")


def test_programs_get_the_clock_of_each_rank(run: Run, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.pftrace"
    clocks = tmp_path / "clocks.json"
    clocks.write_text(json.dumps({"0": {"offset_ns": 7, "uncertainty_ns": 2}, "2": {"offset_ns": 9}}))
    arguments = ("--rank", "0,2", "--clocks", str(clocks), "--align", "clock", "-o", str(path))
    found = run("-o", "json", "export", "--merge", str(job), *arguments).json()
    assert (found["path"], found["size_bytes"]) == (str(path), path.stat().st_size)
    assert found["notes"] == [
        f"rank {rank}: kept in the file, but not shown by viewers: 2 events of the phases be" for rank in (0, 2)
    ]
    assert (found["reference_rank"], found["clock_uncertainty_ns"]) == (0, None)
    assert [(rank["rank"], rank["clock_offset_ns"], rank["clock_method"]) for rank in found["ranks"]] == [
        (0, 7, "given"),
        (2, 9, "given"),
    ]


def test_clocks_of_which_nothing_is_known_are_named(run: Run, job: Path, tmp_path: Path) -> None:
    result = run("export", "--merge", "--align", "clock", str(job), "-o", str(tmp_path / "job.json"))
    assert "3 ranks; the clock offset from rank 0 is unknown for ranks 1, 2" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--merge", "--rank", "7"], 5, "there is no trace of rank 7"),
        (["--rank", "0"], 2, "--rank needs --merge"),
        (["--align", "clock"], 2, "--align needs --merge"),
        (["again"], 2, "got 2 traces: give only one, or merge them into one file with --merge"),
        (
            ["--merge", "--format", "store"],
            2,
            "cannot be merged as 'store'; supported: chrome, chrome-json, perfetto",
        ),
        (["--merge", "--clocks", "nothing.json"], 5, "cannot read nothing.json"),
    ],
    ids=["no-such-rank", "rank-alone", "align-alone", "two", "format", "clocks"],
)
def test_what_is_wrong_is_told(
    run: Run, job: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    result = run("export", str(job), *arguments, "-o", str(tmp_path / "m.json"))
    assert (result.code, message in result.stderr) == (code, True), result


def test_a_merge_does_not_replace_one_of_its_traces(run: Run, job: Path) -> None:
    result = run("export", "--merge", str(job), "-o", str(job / "rank1.json"))
    assert (result.code, "is the input trace itself" in result.stderr) == (2, True)
