"""The result of a capture of many hosts: a verdict for each process, what failed and why, and what to do next."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kineto_trace.base.quantities import format_duration, format_ranges

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.reason_codes import is_explained
from kinetoctl.client import enum_names
from kinetoctl.client.fleet.host_run import LOST, STARTED_APART_NS, Fleet, FleetProgress, HostRun, Rank, began_ns
from kinetoctl.output import units
from kinetoctl.output.capture_progress import counted, states_text
from kinetoctl.output.capture_summary import capture_document, counter_lines, say_problems
from kinetoctl.output.console import emit, print_table, say

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.client.fleet.fleet_files import MergedFile

COLUMNS = ("HOST", "RANK", "PID", "VERDICT", "RECORDS", "CLOCK", "REASON")
MANY = 64  # with more processes, a host whose processes are all done has one line


def ranks_text(numbers: Sequence[int]) -> str:
    """`0-7,9`, as --rank takes it."""
    return format_ranges(sorted(numbers)).replace(" ", "")


def _verdict(rank: Rank) -> str:
    if rank.member.is_lost(rank.target):
        return "UNKNOWN"
    state = enum_names.target_state(rank.target.state)
    return enum_names.verdict(rank.target.verdict) if state == "ENDED" else state


def _reason(rank: Rank, start_ns: int) -> str:
    target = rank.target
    if rank.member.is_lost(target):
        return f"{rank.member.error} [{LOST}]"
    if rank.member.error is not None and enum_names.verdict(target.verdict) == "CANCELLED":
        return _error(rank.member)
    text = f"{target.reason} [{target.reason_code}]" if target.reason_code else target.reason
    begin_ns = began_ns(rank)
    if not text and start_ns and begin_ns is not None and abs(begin_ns - start_ns) > STARTED_APART_NS:
        late = "after" if begin_ns > start_ns else "before"
        return f"started {format_duration(abs(begin_ns - start_ns))} {late} the common start"
    return text


def _rank_number(target: "pb.Target") -> str:
    return str(target.process.rank) if target.process.HasField("rank") else "-"


def _row(rank: Rank, start_ns: int) -> tuple[str, ...]:
    records = sum(count.records for count in rank.target.counts)
    clock = str(rank.member.clock or "-")
    host = rank.member.place.host
    return (
        *(host, _rank_number(rank.target), str(rank.target.pid), _verdict(rank)),
        *(units.count(records), clock, _reason(rank, start_ns)),
    )


def _host_row(member: HostRun, start_ns: int) -> tuple[str, ...] | None:
    """One row for all processes of a host, or None if one of them needs a row of its own."""
    ranks = [Rank(member, target) for target in member.targets]
    if any(_verdict(rank) != "DONE" or _reason(rank, start_ns) for rank in ranks):
        return None
    numbers = [rank.target.process.rank for rank in ranks if rank.target.process.HasField("rank")]
    records = sum(count.records for rank in ranks for count in rank.target.counts)
    which = ranks_text(numbers) if len(numbers) == len(ranks) else "-"
    clock = str(member.clock or "-")
    return member.place.host, which, f"{len(ranks)} processes", "DONE", units.count(records), clock, ""


def rows(fleet: Fleet) -> Iterator[tuple[str, ...]]:
    """One row for each process, and for each host that has none."""
    many = sum(len(member.targets) for member in fleet.members) > MANY
    for member in fleet.members:
        if not member.targets:
            verdict = "no process" if fleet.has_no_part(member) else "FAILED"
            yield member.place.host, "-", "-", verdict, "-", "-", _error(member)
            continue
        row = _host_row(member, fleet.start_ns) if many else None
        if row is not None:
            yield row
        else:
            yield from (_row(Rank(member, target), fleet.start_ns) for target in member.targets)


def _error(member: HostRun) -> str:
    if member.error is None:
        return "-"
    code = f" [{member.error.reason_code}]" if member.error.reason_code else ""
    return f"{member.error}{code}"


def _codes(fleet: Fleet) -> list[str]:
    """The reason codes in the table that can be explained, each once."""
    codes = [member.error.reason_code for member in fleet.failed() if member.error is not None]
    for rank in fleet.processes():
        codes.append(LOST if rank.member.is_lost(rank.target) else rank.target.reason_code)
    return [code for code in dict.fromkeys(codes) if is_explained(code)]


def notes(fleet: Fleet) -> Iterator[str]:
    """The notes below the table."""
    for member in fleet.members:
        for warning in member.warnings:
            yield f"{member.place.host}: {warning}"
        if member.capture is not None:
            yield from (f"{member.place.host}: {line}" for line in counter_lines(member.capture))
        for target in member.targets:
            for warning in target.warnings:
                yield f"{member.place.host} {enum_names.target(target)}: {warning}"
    yield from (f"`kinetoctl explain {code}` says what to do" for code in _codes(fleet))
    if missing := fleet.missing_ranks():
        yield f"no host has rank {ranks_text(missing)}"
    spread_ns, uncertainty_ns = fleet.spread_ns(), fleet.uncertainty_ns()
    if fleet.start_ns and spread_ns is not None and uncertainty_ns is not None:
        yield (
            f"the windows start within {format_duration(spread_ns)} of each other, "
            f"with a clock uncertainty of ±{format_duration(uncertainty_ns)}"
        )


def _status(fleet: Fleet) -> str:
    states = states_text(counted(fleet.members)) or "no process"
    failed = len(fleet.failed())
    hosts = "1 host" if len(fleet.members) == 1 else f"{units.count(len(fleet.members))} hosts"
    hosts += f", {units.count(failed)} of them failed" if failed else ""
    return f"capture {fleet.id} on {hosts}: {states}"


def merged_text(result: "MergedFile") -> str:
    """The path of the merged file and the uncertainty of its clocks."""
    merged = result.merged
    known = merged.alignment.uncertainty_ns
    apart = "the offset of some clocks is unknown"
    if known is not None:
        apart = f"their clocks within {format_duration(known)} of rank {merged.reference_rank}'s"
    size = units.size(merged.written.size_bytes)
    return f"{merged.written.path} ({size}): {len(merged.ranks)} ranks, {apart}"


def note_merged(result: "MergedFile | None", progress: FleetProgress) -> None:
    """Reports the merged file, if there is one, and what to know about it."""
    if result is None:
        return
    progress.note(f"merged: {merged_text(result)}")
    for note in result.merged.written.notes:
        progress.note(f"note: {note}")
    if result.renumbered:
        progress.note("note: ranks are missing or duplicated, so the processes are numbered in their order")


def show_fleet_result(fleet: Fleet, folder: Path | None, merged: "MergedFile | None", settings: CommonOptions) -> None:
    """Print the result in the format of --output. folder: where the files of the processes are."""
    say_problems(fleet.all_problems())
    if settings.output != "table":
        emit(fleet_document(fleet, folder, merged), settings.output)
        return
    say(_status(fleet))
    if fleet.unmet:
        say(f"not started: {fleet.unmet}")
    print_table(COLUMNS, list(rows(fleet)), color=settings.color, folds=True)
    for note in notes(fleet):
        say(f"note: {note}")
    if folder is not None and any(member.paths for member in fleet.members):
        say(f"files: {folder}{'/'}")
        if merged is not None:
            say(f"merged: {merged_text(merged)}")
        say(f"analyse: kinetoctl report {shlex.quote(str(folder))}")


def fleet_document(fleet: Fleet, folder: Path | None = None, merged: "MergedFile | None" = None) -> dict[str, Any]:
    """The result as plain values: captures as in profiler.proto, with the paths of downloaded files."""
    return {
        "id": fleet.id,
        "exit_code": int(fleet.exit_code()),
        "not_begun": fleet.unmet,
        "start_time_ns": fleet.start_ns,
        "start_spread_ns": fleet.spread_ns(),
        "clock_uncertainty_ns": fleet.uncertainty_ns(),
        "missing_ranks": fleet.missing_ranks(),
        "folder": str(folder) if folder else None,
        "merged": None if merged is None else _merged_document(merged),
        "hosts": [_host_document(member) for member in fleet.members],
    }


def _merged_document(result: "MergedFile") -> dict[str, Any]:
    merged = result.merged
    return {
        "path": str(merged.written.path),
        "size_bytes": merged.written.size_bytes,
        "reference_rank": merged.reference_rank,
        "clock_uncertainty_ns": merged.alignment.uncertainty_ns,
        "ranks": merged.clocks(),
        "notes": list(merged.written.notes),
    }


def _host_document(member: HostRun) -> dict[str, Any]:
    clock = member.clock
    return {
        "host": member.place.host,
        "address": member.place.address,
        "error": None if member.error is None else str(member.error),
        "reason_code": "" if member.error is None else member.error.reason_code,
        "clock": clock and {"offset_ns": clock.offset_ns, "uncertainty_ns": clock.uncertainty_ns},
        "warnings": list(member.warnings),
        "lost_pids": [target.pid for target in member.targets if member.is_lost(target)],
        "capture": None if member.capture is None else capture_document(member.capture, member.paths),
    }
