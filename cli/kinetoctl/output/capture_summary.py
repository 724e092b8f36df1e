"""The result of a capture: for each target its files, what they hold, the overhead, and how to open them.

`target_lines` is pure and returns pairs of a label and a text. `print_capture` writes them to stdout.
"""

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kineto_protos.plain import standing_text
from kineto_trace.base.quantities import format_duration, format_ranges, lasted, shortened, shortened_apart
from kineto_trace.base.source_places import short_place
from kineto_trace.base.visible_text import one_line
from kineto_trace.store.output_formats import ATTACHMENT_SUFFIXES, ATTACHMENTS
from rich.console import Console
from rich.text import Text

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.reason_codes import advices, is_explained, remedy
from kinetoctl.client import enum_names
from kinetoctl.client.fleet.host_run import LOST, STARTED_APART_NS, Fleet, FleetProgress, HostRun, Rank, began_ns
from kinetoctl.errors import CliError
from kinetoctl.output import units
from kinetoctl.output.capture_progress import counted, states_text
from kinetoctl.output.console import PIPE_WIDTH, emit, plain, print_table, print_verdict, say, say_text, stdout_console

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.client.fleet.fleet_files import MergedFile


Line = tuple[str, str]
NAME_WIDTH = 76
LEAST_COMMAND = 16  # characters that stay of a command line in any terminal
LABEL_WIDTH = 12
_BETWEEN = " · "
WAYS = {
    "torch_ops": "ops by",
    "memory_snapshot": "snapshot",
}  # a source with several methods -> the label of the method that it used
TIMES = "\N{MULTIPLICATION SIGN}"
STYLES = {"DONE": "bold green", "PARTIAL": "bold yellow", "FAILED": "bold red", "CANCELLED": "bold yellow"}


def _file_lines(capture: "pb.Capture", target: "pb.Target", paths: Mapping[str, Path]) -> Iterator[Line]:
    for file in target.files:
        path = paths.get(file.format)
        if path is not None:
            yield "file", f"{path} ({units.size(file.size_bytes)}, SHA-256 verified)"
        else:
            fetch = f"kinetoctl captures fetch {capture.id}"
            yield "file", f"{file.format}, {units.size(file.size_bytes)} in the daemon's store: `{fetch}`"
        if text := damage(file):
            yield "damaged", text


def _window_lines(target: "pb.Target") -> Iterator[Line]:
    start, end = target.summary.window_start_ns, target.summary.window_end_ns
    if end > start:
        yield "window", f"{format_duration(end - start)} from {units.moment(start)}"


def _iteration_lines(summary: "pb.Summary") -> Iterator[Line]:
    first, last = summary.first_iteration, summary.first_iteration + summary.iterations - 1
    if summary.iterations > 0:
        yield "iterations", f"{first}" if first == last else f"{first}-{last}"


def _content_lines(summary: "pb.Summary") -> Iterator[Line]:
    counts = sorted(summary.activities.items(), key=lambda item: (-item[1], item[0]))
    if counts:
        yield "holds", ", ".join(f"{units.count(number)} {activity}" for activity, number in counts)
    if summary.gpu_busy_fraction >= 0 and counts:
        yield "GPU busy", f"{summary.gpu_busy_fraction:.1%} of the window"


def _top_lines(label: str, stats: "Iterable[tuple[str, pb.KernelStat]]", unit: str) -> Iterator[Line]:
    listed = list(stats)
    names = shortened_apart([name for name, _ in listed], NAME_WIDTH)
    for position, (name, (_, stat)) in enumerate(zip(names, listed, strict=True)):
        amount = f"{format_duration(stat.total_ns):>8}  {units.count(stat.count):>9} {unit}"
        yield label if position == 0 else "", f"{amount}  {name}"


def _python_lines(summary: "pb.Summary") -> Iterator[Line]:
    """The functions with the most samples, with their lines; the states of threads; and threads without Python."""
    names = shortened_apart([short_place(stat.name) for stat in summary.top_functions], NAME_WIDTH)
    for position, (name, stat) in enumerate(zip(names, summary.top_functions, strict=True)):
        amount = f"{format_duration(stat.total_ns):>8}  {units.count(stat.count):>9} samples"
        yield "top Python" if position == 0 else "", f"{amount}  {name}{_hot_lines(stat)}"
    states = summary.python_samples
    if known := states.running + states.waiting + states.idle:
        parts = [f"{states.running / known:.0%} running", f"{states.waiting / known:.0%} waiting for the GIL"]
        yield "threads", f"of {units.count(known)} samples: {', '.join(parts)}, {states.idle / known:.0%} idle"
    for position, thread in enumerate(summary.native_threads):
        amount = f"{format_duration(thread.cpu_ns):>8}  {thread.cpu_fraction:>10.1%} of a core"
        name = shortened(thread.name or "unnamed", NAME_WIDTH)
        yield "no Python" if position == 0 else "", f"{amount}  {name} (thread {thread.thread})"


def _hot_lines(stat: "pb.KernelStat") -> str:
    """' · line 57' or ' · lines 57 (61%), 63 (20%)', most samples first, and the samples that waited for the GIL."""
    shares = [f"{entry.line} ({entry.count / max(stat.count, 1):.0%})" for entry in stat.lines]
    text = f" · lines {', '.join(shares)}" if len(shares) > 1 else ""
    if len(stat.lines) == 1:
        text = f" · line {stat.lines[0].line}"
    return text + (f" · {units.count(stat.waiting)} more waiting for the GIL" if stat.waiting else "")


def _way_lines(counts: "Iterable[pb.SourceCounts]") -> Iterator[Line]:
    for each in counts:
        if each.way:
            yield WAYS.get(each.source, each.source), each.way


def _recorder_lines(target: "pb.Target") -> Iterator[Line]:
    if _by_kineto(target):
        yield "recorder", "the process's own libkineto (overhead not measured)"


def _by_kineto(target: "pb.Target") -> bool:
    return target.recorder == enum_names.RECORDERS["kineto"]


def _loss_line(target: "pb.Target") -> Line:
    if _by_kineto(target):
        return "dropped", "unknown: libkineto does not report it"
    losses = [f"{c.source} {units.count(c.dropped)}" for c in target.counts if c.dropped]
    return "dropped", ", ".join(losses) or "nothing"


def _attach_lines(target: "pb.Target") -> Iterator[Line]:
    if not target.HasField("attach"):
        return
    attach = target.attach
    stopped = f"a thread stopped for {format_duration(attach.stopped_ns)}" if attach.stopped_ns else "no thread stopped"
    yield "attach", f"{attach.method}: took {format_duration(attach.latency_ns)}, {stopped}"


def _overhead_lines(target: "pb.Target") -> Iterator[Line]:
    cost = target.overhead
    parts = [
        f"{label} {format_duration(value)}"
        for label, value in (
            ("start", cost.start_ns),
            ("stop", cost.stop_ns),
            ("detach", cost.detach_ns),
            ("agent CPU", cost.agent_cpu_ns),
        )
        if value
    ]
    if cost.step_ratio:
        parts.append(f"step time {TIMES}{cost.step_ratio:.2f}")
    elif cost.least_step_ratio:
        parts.append(f"step time {TIMES}{cost.least_step_ratio:.2f} or more (the program's own pace changed)")
    if parts:
        yield "overhead", ", ".join(parts)
    if target.requested_ns and target.collecting_ns and target.collected_ns and target.stored_ns:
        to_start = format_duration(target.collecting_ns - target.requested_ns)
        to_file = format_duration(target.stored_ns - target.collected_ns)
        yield (
            "delays",
            f"{to_start} from the request to the first record, {to_file} from the last record to the stored file",
        )


def _open_lines(target: "pb.Target", paths: Mapping[str, Path]) -> Iterator[Line]:
    trace = next((path for file_format, path in paths.items() if file_format not in ATTACHMENT_SUFFIXES), None)
    if trace is not None:
        rank = target.process.rank if target.process.HasField("rank") else 0
        yield "analyse", f"kinetoctl report {shlex.quote(str(trace))}"
        yield "open with", "kinetoctl open, or https://ui.perfetto.dev or chrome://tracing (drop the file there)"
        yield "", f'or HTA: TraceAnalysis(trace_files={{{rank}: "{trace}"}})'
    if snapshot := paths.get(ATTACHMENTS["memory_snapshot"]):
        yield "snapshot in", f"kinetoctl web {shlex.quote(str(snapshot))} (or `kinetoctl report`)"
        yield "", "or https://pytorch.org/memory_viz (drop the .pickle there; it stays on this machine)"
        yield "", f"or `python -m torch.cuda._memory_viz trace_plot {snapshot} -o memory.html`"


def target_lines(
    capture: "pb.Capture", target: "pb.Target", paths: Mapping[str, Path], *, remedies: bool = False
) -> list[Line]:
    """The lines about one target. paths: its verified files on this machine, by format.

    remedies: says what to do, instead of which command says it.
    """
    lines: list[Line] = []
    if target.reason:
        lines.append(("reason", f"{target.reason} [{target.reason_code}]" if target.reason_code else target.reason))
        if remedies and (advice := remedy(target.reason_code)):
            lines.append(("what to do", advice))
        elif is_explained(target.reason_code):
            lines.append(("", f"run `kinetoctl explain {target.reason_code}` for advice"))
    if target.HasField("standing"):
        call = target.standing
        lines.append(("no progress", standing_text(call, target.pid, lasted(call.since_ns, time.time_ns()))))
    lines += _recorder_lines(target)
    lines += _file_lines(capture, target, paths)
    if target.files:
        lines += _window_lines(target)
        lines += _iteration_lines(target.summary)
        lines += _content_lines(target.summary)
        kernels = target.summary.top_kernels
        lines += _top_lines("top ops", ((stat.name, stat) for stat in target.summary.top_ops), TIMES)
        lines += _top_lines("top kernels", ((stat.name, stat) for stat in kernels), TIMES)
        lines += _python_lines(target.summary)
        lines += _way_lines(target.counts)
        lines.append(_loss_line(target))
        lines += _attach_lines(target)
        lines += _overhead_lines(target)
    lines += (("warning", warning) for warning in target.warnings)
    lines += _open_lines(target, paths)
    return lines


def _title(target: "pb.Target", room: int) -> str:
    """Whose trace it is, in about this many characters: the command line gives way."""
    process = target.process
    facts = [enum_names.target(target), enum_names.pod(process), process.framework]
    taken = sum(len(fact) + len(_BETWEEN) for fact in facts if fact)
    command = shortened(" ".join(process.command), max(LEAST_COMMAND, min(NAME_WIDTH, room - taken)))
    return _BETWEEN.join(filter(None, [*facts, command]))


def _status(name: str) -> Text:
    return Text(name, style=STYLES.get(name, "bold"))


def _print_target(console: Console, capture: "pb.Capture", target: "pb.Target", paths: Mapping[str, Path]) -> None:
    ended = enum_names.target_state(target.state) == "ENDED"
    name = enum_names.verdict(target.verdict) if ended else enum_names.target_state(target.state)
    room = console.width - len(f": {name}") - 1 if console.is_terminal else PIPE_WIDTH
    console.print(Text.assemble("\n", (one_line(_title(target, room)), "bold"), ": ", _status(name)))
    for label, text in target_lines(capture, target, paths):
        console.print(Text.assemble("  ", (one_line(label).ljust(LABEL_WIDTH), "cyan"), one_line(text)))


def print_capture(
    capture: "pb.Capture", paths: Mapping[tuple[int, int, str], Path], *, color: bool, missing: str = ""
) -> None:
    """Prints the capture on stdout. paths: verified files by pid, start time and format; missing: what is not here."""
    console = stdout_console(color=color)
    print_verdict(capture.answer.verdict, color=color)
    status = _status(enum_names.capture_status(capture.status))
    lacking = (f", {missing}", STYLES["FAILED"]) if missing else ""
    console.print(Text.assemble(one_line(f"capture {capture.id} on {capture.host}: "), status, lacking))
    if capture.spec.labels:
        labels = ", ".join(f"{key}={capture.spec.labels[key]}" for key in sorted(capture.spec.labels))
        console.print(Text(one_line(f"labels {labels}")))
    for line in (*kept_lines(capture), *counter_lines(capture)):
        console.print(Text(one_line(line)))
    for target in capture.targets:
        own = {f: path for (pid, start, f), path in paths.items() if (pid, start) == (target.pid, target.start_time_ns)}
        _print_target(console, capture, target, own)


Paths = Mapping[tuple[int, int, str], Path]


def capture_document(capture: "pb.Capture", paths: Paths) -> dict[str, Any]:
    """The capture, and for each file its `path` on this machine (null if it was not fetched)."""
    document = plain(capture)
    for target in document["targets"]:
        for file in target["files"]:
            path = paths.get((target["pid"], target["start_time_ns"], file["format"]))
            file["path"] = str(path) if path else None
    return document


def say_problems(problems: Sequence[CliError]) -> None:
    """Says on stderr, also with --quiet, which files are missing and what to do."""
    for problem in problems:
        say(f"error: {problem}", err=True)
    for advice in dict.fromkeys(each for problem in problems for each in advices(problem)):
        say_text(advice, err=True)


def show_capture(
    capture: "pb.Capture", paths: Paths, settings: CommonOptions, problems: Sequence[CliError] = ()
) -> None:
    """Print one capture. problems: with its files."""
    say_problems(problems)
    if settings.output == "table":
        missing = ("but not all files were downloaded" if paths else "but not downloaded") if problems else ""
        print_capture(capture, paths, color=settings.color, missing=missing)
    else:
        emit(capture_document(capture, paths), settings.output)


def kept_lines(capture: "pb.Capture") -> Iterator[str]:
    """Lines about the files of an ended capture as a whole."""
    if capture.pinned:
        yield "pinned: retention does not remove it"
    upload = capture.upload
    state = enum_names.upload_state(upload.state)
    if state == "UPLOADED":
        local = "; its files are no longer on the host" if capture.local_bytes == 0 else ""
        verified = f"{units.size(upload.bytes)}, verified {units.moment(upload.uploaded_ns)}"
        yield f"uploaded to {upload.url} ({verified}){local}"
    elif state == "RUNNING":
        yield f"uploading to {upload.url}: {units.size(upload.bytes)} of {units.size(upload.total_bytes)}"
    elif state == "RETRYING":
        again = (
            f"; next attempt at {units.moment(upload.next_try_ns)}"
            if upload.next_try_ns
            else "; uploads are now disabled"
        )
        yield f"the upload to {upload.url} failed {_counted(upload.failures, 'time')}: {upload.error}{again}"
    elif state == "WAITING":
        yield f"waiting to be uploaded to {upload.url}"


def damage(file: "pb.TraceFile") -> str:
    """What is damaged in a file; empty if nothing is known to be."""
    return f"{file.format} is damaged: it {file.damage}" if file.damage else ""


# What a capture sampled of the hardware counters of each GPU, what was lost, and what was refused. Pure.
def counter_lines(capture: "pb.Capture") -> Iterator[str]:
    """One line for each GPU, and one for each metric that it left out."""
    for each in capture.counters:
        name = f" ({each.gpu.name})" if each.gpu.name else ""
        yield f"counters of GPU {each.gpu.index}{name}: {_figures(each)}"
        for metric in each.left_out:
            yield f"counters of GPU {each.gpu.index} do not include {metric.name}: {metric.why}"


def _figures(each: "pb.RecordedCounters") -> str:
    parts = []
    if each.metrics:
        parts += [f"{_counted(each.samples, 'sample')} of {', '.join(metric.label for metric in each.metrics)}"]
        lost = [f"{format_duration(each.lost_ns)} in {_counted(each.gaps, 'gap')}"] if each.gaps else []
        lost += [f"{_counted(each.dropped_samples, 'sample')} dropped"] if each.dropped_samples else []
        if lost or not each.reason_code:  # what came after an early end is lost, too
            parts.append(f"lost {', '.join(lost) or 'nothing'}")
    if each.reason_code:
        parts.append(f"{each.reason} [{each.reason_code}]")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{units.count(number)} {noun if number == 1 else noun + 's'}"


# The result of a capture of many hosts: a verdict for each process, what failed and why, and what to do next.
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
    yield from (f"run `kinetoctl explain {code}` for advice" for code in _codes(fleet))
    if missing := fleet.missing_ranks():
        yield f"no host has rank {ranks_text(missing)}"
    spread_ns, uncertainty_ns = fleet.spread_ns(), fleet.uncertainty_ns()
    if fleet.start_ns and spread_ns is not None and uncertainty_ns is not None:
        yield (
            f"the windows start within {format_duration(spread_ns)} of each other, "
            f"with a clock uncertainty of ±{format_duration(uncertainty_ns)}"
        )


def _fleet_status(fleet: Fleet) -> str:
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
        apart = f"with clocks within {format_duration(known)} of rank {merged.reference_rank}'s"
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
        progress.note("note: ranks are missing or duplicated, so the processes are numbered in order instead")


def show_fleet_result(fleet: Fleet, folder: Path | None, merged: "MergedFile | None", settings: CommonOptions) -> None:
    """Print the result in the format of --output. folder: where the files of the processes are."""
    say_problems(fleet.all_problems())
    if settings.output != "table":
        emit(fleet_document(fleet, folder, merged), settings.output)
        return
    print_verdict(fleet.answer.verdict, color=settings.color)
    say(_fleet_status(fleet))
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
        "answer": plain(fleet.answer),
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
