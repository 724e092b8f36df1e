"""What results mean, and whether the kernel lets this process read counters."""

from pathlib import Path

import pytest
from kinetod.counters.interface import CounterCode
from kinetod.counters.level_zero.level_zero_results import not_started, rights_problem, translated
from kinetod.counters.level_zero.tools_library import LevelZeroFailure

CAP_PERFMON, CAP_SYS_ADMIN = 1 << 38, 1 << 21


def host(folder: Path, *, i915: str = "", xe: str = "", capabilities: int = 0) -> Path:
    for name, value in (("i915/perf_stream_paranoid", i915), ("xe/observation_paranoid", xe)):
        if value:
            path = folder / "sys/dev" / name
            path.parent.mkdir(parents=True)
            path.write_text(f"{value}\n")
    (folder / "self").mkdir()
    (folder / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    return folder


@pytest.mark.parametrize(
    ("facts", "drivers", "refused"),
    [
        ({"i915": "1"}, ["i915"], "perf_stream_paranoid is not 0"),
        ({"xe": "1"}, ["xe"], "observation_paranoid is not 0"),
        ({"xe": "1", "i915": "0"}, ["i915", "xe"], "sysctl dev.xe.observation_paranoid=0"),
        ({"xe": "1", "i915": "0"}, ["i915"], ""),
        ({"i915": "1", "capabilities": CAP_PERFMON}, ["i915"], ""),
        ({"xe": "1", "capabilities": CAP_SYS_ADMIN}, ["xe"], ""),
        ({"i915": "1", "capabilities": 1}, ["i915"], "adds CAP_PERFMON"),
        ({}, ["i915", "xe"], ""),
    ],
)
def test_rights_are_those_that_the_kernel_asks_for(
    tmp_path: Path, facts: dict[str, str | int], drivers: list[str], refused: str
) -> None:
    problem = rights_problem(drivers, host(tmp_path, **facts))  # type: ignore[arg-type]
    assert (refused in problem) if refused else problem == ""


def test_a_library_that_does_not_start_is_told_with_the_rights_first(tmp_path: Path) -> None:
    failure = LevelZeroFailure("zeInit", 0x78000001)
    error = not_started(failure, host(tmp_path, i915="1"))
    assert error.code is CounterCode.NOT_PERMITTED and "perf_stream_paranoid" in error.reason
    (tmp_path / "sys/dev/i915/perf_stream_paranoid").write_text("0\n")
    error = not_started(failure, tmp_path)
    assert error.code is CounterCode.UNAVAILABLE and "zeInit returned 0x78000001" in error.reason


@pytest.mark.parametrize(("seen", "code"), [(True, CounterCode.BUSY), (False, CounterCode.FAILED)])
def test_a_stream_that_does_not_open_is_busy_only_if_somebody_is_seen_to_have_one(
    tmp_path: Path, seen: bool, code: CounterCode
) -> None:
    if seen:
        files = tmp_path / "1234/fd"
        files.mkdir(parents=True)
        (files / "5").symlink_to("anon_inode:[i915_perf]")
    error = translated(LevelZeroFailure("zetMetricStreamerOpen", 0x7FFFFFFE), "G", tmp_path)
    assert error.code is code


def test_a_stream_of_this_process_that_is_still_open_is_nobody_elses(tmp_path: Path) -> None:
    error = translated(LevelZeroFailure("zetMetricStreamerOpen", 0x78000006), "G", tmp_path)
    assert error.code is CounterCode.FAILED and "must be started anew" in error.reason
