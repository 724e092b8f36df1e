"""What the parts of a capture of many hosts come to: exit codes, the table and its notes."""

from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.fleet.clock_offsets import Offset
from kinetoctl.client.fleet.host_run import Fleet, HostRun
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import CliError, Denied, DownloadFailed, NotFound, Unreachable
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.fleet_summary import fleet_document, notes, ranks_text, rows, show_fleet_result
from support.service import captures

MS = 1_000_000
CLOCK = Offset(2 * MS, 300_000)
GONE = Unreachable("no daemon at n1:50051: gone")


def target(
    rank: int, verdict: pb.Verdict = pb.VERDICT_DONE, *, reason: str = "", begin_ns: int = 0, running: bool = False
) -> pb.Target:
    files = (captures.trace_file(),) if verdict in (pb.VERDICT_DONE, pb.VERDICT_PARTIAL) else ()
    made = captures.target(
        4000 + rank,
        state=pb.TARGET_STATE_COLLECT if running else pb.TARGET_STATE_ENDED,
        verdict=pb.VERDICT_UNSPECIFIED if running else verdict,
        reason=reason,
        files=files,
    )
    made.process.rank = rank
    made.summary.window_start_ns = begin_ns
    return made


def member(host: str, *targets: pb.Target, error: CliError | None = None) -> HostRun:
    capture = captures.capture(*targets, status=pb.CAPTURE_STATUS_DONE) if targets else None
    return HostRun(Place(host, f"{host}:50051"), capture, error=error, clock=CLOCK if targets else None)


def fleet(*members: HostRun, ranks: frozenset[int] = frozenset()) -> Fleet:
    return Fleet(id="f1", members=list(members), ranks=ranks)


def code(*members: HostRun, ranks: frozenset[int] = frozenset()) -> ExitCode:
    return fleet(*members, ranks=ranks).exit_code()


def test_0_is_only_for_everything() -> None:
    whole = member("n0", target(0), target(1))
    assert code(whole, member("n1", target(2))) == ExitCode.DONE
    assert code(whole, member("n1", target(2, pb.VERDICT_PARTIAL))) == ExitCode.PARTIAL
    assert code(whole, member("n1", target(2, pb.VERDICT_FAILED))) == ExitCode.PARTIAL
    assert code(whole, member("n1", error=GONE)) == ExitCode.PARTIAL


def test_a_process_whose_host_is_lost_is_never_done() -> None:
    lost = member("n1", target(2, running=True), error=GONE)
    assert code(member("n0", target(0)), lost) == ExitCode.PARTIAL
    assert code(lost) == ExitCode.FAILED
    (row,) = rows(fleet(lost))
    assert row[:4] == ("n1", "2", "4002", "UNKNOWN")
    assert row[-1] == "no daemon at n1:50051: gone [HOST_LOST]"


@pytest.mark.parametrize(
    ("error", "expected"),
    [(GONE, ExitCode.UNREACHABLE), (Denied("no"), ExitCode.DENIED), (NotFound("none"), ExitCode.NOT_FOUND)],
)
def test_if_all_hosts_fail_alike_the_code_is_that_of_their_error(error: CliError, expected: ExitCode) -> None:
    assert code(member("n0", error=error), member("n1", error=error)) == expected


def test_if_they_fail_differently_it_is_failed() -> None:
    assert code(member("n0", error=GONE), member("n1", error=Denied("no"))) == ExitCode.FAILED
    assert code(member("n0", target(0, pb.VERDICT_FAILED))) == ExitCode.FAILED


def test_what_was_not_begun_is_failed_though_its_parts_were_cancelled() -> None:
    cancelled = fleet(member("n0", target(0, pb.VERDICT_CANCELLED)))
    assert cancelled.exit_code() == ExitCode.CANCELLED
    cancelled.unmet = "only 1 of 2 hosts are ready"
    assert cancelled.exit_code() == ExitCode.FAILED


def test_with_ranks_a_host_without_them_is_no_failure_but_a_rank_that_nobody_has_is() -> None:
    members = member("n0", target(0)), member("n1", error=NotFound("no process matches"))
    assert code(*members, ranks=frozenset({0})) == ExitCode.DONE
    assert code(*members, ranks=frozenset({0, 5, 6})) == ExitCode.PARTIAL
    assert "no host has rank 5-6" in list(notes(fleet(*members, ranks=frozenset({0, 5, 6}))))
    assert code(*members) == ExitCode.PARTIAL


def test_files_that_are_not_here_are_partial_or_failed() -> None:
    first, second = member("n0", target(0)), member("n1", target(1))
    second.problems.append(DownloadFailed("disk full"))
    assert code(first, second) == ExitCode.FAILED
    first.paths[4000, 4000, "chrome"] = Path("trace.json.gz")
    assert code(first, second) == ExitCode.PARTIAL


def test_an_interrupted_capture_is_130_whatever_came_of_it() -> None:
    stopped = fleet(member("n0", target(0)))
    stopped.interrupted = True
    assert stopped.exit_code() == ExitCode.INTERRUPTED


def test_each_process_has_a_row_with_its_verdict_and_reason() -> None:
    found = fleet(
        member("n0", target(0), target(1, pb.VERDICT_FAILED, reason="it exited")),
        member("n1", error=Denied("not yours", reason_code="PERMISSION_DENIED")),
    )
    assert list(rows(found)) == [
        ("n0", "0", "4000", "DONE", "0", "+2 ms ±300 µs", ""),
        ("n0", "1", "4001", "FAILED", "0", "+2 ms ±300 µs", "it exited"),
        ("n1", "-", "-", "FAILED", "-", "-", "not yours [PERMISSION_DENIED]"),
    ]


def test_below_the_rows_each_reason_code_is_named_once_with_the_command_that_explains_it() -> None:
    dropped = [target(rank, pb.VERDICT_PARTIAL, reason="full") for rank in (0, 1)]
    for each in dropped:
        each.reason_code = "RECORDS_DROPPED"
    refused = member("n1", error=Denied("no", reason_code="NO_ROLE"))
    without = member("n2", error=NotFound("no process matches", reason_code="NO_MATCH"))
    assert list(notes(fleet(member("n0", *dropped), refused, without, ranks=frozenset({0, 1})))) == [
        "`kinetoctl explain NO_ROLE` says what to do",
        "`kinetoctl explain RECORDS_DROPPED` says what to do",
    ]


def test_of_many_processes_those_of_a_host_that_are_all_done_share_a_row() -> None:
    many = member("n0", *(target(rank) for rank in range(64)))
    found = fleet(many, member("n1", target(64), target(65, pb.VERDICT_PARTIAL, reason="lost records")))
    assert [row[:4] for row in rows(found)] == [
        ("n0", "0-63", "64 processes", "DONE"), ("n1", "64", "4064", "DONE"), ("n1", "65", "4065", "PARTIAL"),
    ]  # fmt: skip


def test_a_window_that_began_elsewhere_is_told() -> None:
    start_ns = captures.START_NS
    late = member("n0", target(0, begin_ns=start_ns - 2 * MS), target(1, begin_ns=start_ns + 40 * MS))
    found = fleet(late)
    found.start_ns = start_ns
    assert [row[-1] for row in rows(found)] == ["", "started 42 ms after the common start"]
    assert list(notes(found)) == ["the windows start within 42 ms of each other, with a clock uncertainty of ±300 µs"]


def test_the_document_says_everything() -> None:
    found = fleet(member("n0", target(0)), member("n1", target(1, running=True), error=GONE))
    document = fleet_document(found)
    assert (document["id"], document["exit_code"], document["merged"]) == ("f1", 4, None)
    first, second = document["hosts"]
    assert first["clock"] == {"offset_ns": 2 * MS, "uncertainty_ns": 300_000}
    assert first["capture"]["targets"][0]["files"][0]["path"] is None
    assert (second["error"], second["lost_pids"]) == (str(GONE), [4001])


def test_ranks_are_written_as_ranges() -> None:
    assert [ranks_text([3]), ranks_text([9, 0, 1, 2]), ranks_text([4, 5])] == ["3", "0-2,9", "4-5"]


@pytest.mark.parametrize("output", ["table", "json"])
def test_quiet_still_says_which_files_are_missing_and_what_to_do(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = member("n0", target(0))
    one.problems.append(DownloadFailed("the disk of /traces is full").about("n0 pid 4000, rank 0"))
    settings = CommonOptions(address="", output=output, color=False, quiet=True, timeout_s=1.0)
    show_fleet_result(fleet(one), tmp_path, None, settings)
    assert capsys.readouterr().err.splitlines() == [
        "error: n0 pid 4000, rank 0: the disk of /traces is full",
        "The trace stays in the daemon's store: `kinetoctl captures fetch ID` downloads it again.",
    ]
