"""`kinetoctl report` over small stored traces."""

import csv
import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.store.parquet_folder import save_columns
from kineto_trace.view_api.cell_texts import view_title
from kinetoctl.commands.report import JOB_OVERVIEW, OVERVIEW, PLUGIN_OVERVIEW, TOP_FINDINGS
from support.service import captures
from support.service.cli import Run, environment, run_here, run_process
from support.service.fake_profiler import FakeProfiler, FakeServer, serve
from support.service.stored import store
from support.targets.memory_snapshots import MIB, snapshot, write_snapshot
from support.trace_files.sampled_stacks import MAIN, SITE, sampled_trace
from support.trace_files.traces import trace
from support.trace_files.training_ranks import Job, write_job
from support.trace_files.uploaded import upload
from support.waiting import scaled

NOT_RECORDED = "\nWhat was not recorded (not_recorded)\n"
MARK = {"time_causes": " (time_causes)", "findings": " (findings)", "not_recorded": " (not_recorded)"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_here(capsys, "unix:/nowhere.sock", *arguments)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    store(folder / "rank0", rank=0)
    store(folder / "rank1", rank=1, kernel_us=60)
    return folder


def test_a_trace_alone_gives_overview_and_findings(run: Run, traces: Path) -> None:
    result = run("report", str(traces / "rank0"))
    assert (result.code, result.stderr) == (0, "")
    nothing = {"python_samples", "roofline"}  # it has no samples, of neither kind
    for name in OVERVIEW:
        assert (f"{view_title(name)}{MARK.get(name, '')}\n" in result.stdout) == (name not in nothing)


def steps_of(start_us: float, step_us: float) -> dict[str, list[dict[str, object]]]:
    """A Chrome trace of three steps, half of each a kernel."""
    events: list[dict[str, object]] = []
    for number in range(3):
        begin = start_us + number * step_us
        step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": 7, "tid": 7}
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "args": {"device": 0, "stream": 7}}
        events += [{**step, "ts": begin, "dur": step_us}, {**kernel, "ts": begin, "dur": step_us / 2}]
    return {"traceEvents": events}


def test_below_the_verdict_is_a_bar_of_the_shares_of_each_rank(run: Run, traces: Path) -> None:
    _verdict, bar, rest = run("report", str(traces / "rank0")).stdout.split("\n\n", 2)
    line, *legend = bar.splitlines()
    assert (len(line), line[0], legend[0][:2]) == (80, "█", "█ ")
    assert rest.startswith("Where the step time goes")
    _verdict, bars, _rest = run("report", str(traces)).stdout.split("\n\n", 2)
    lines = bars.splitlines()
    assert [(len(line), line[:7]) for line in lines[:2]] == [(80, "rank 0 "), (80, "rank 1 ")]
    assert all(mark in lines[2] for mark in set(lines[0][7:]))


def test_a_view_is_a_table_with_human_times(run: Run, traces: Path) -> None:
    result = run("report", str(traces / "rank0"), "--view", "diff_step_times")
    assert result.code == 2
    result = run("report", str(traces / "rank0"), "--view", "kernels", "--columns", "name,calls,total_us")
    assert (result.code, result.stdout) == (0, "NAME  CALLS  TOTAL\ngemm      2  60 µs\n")


def test_json_is_exact_and_by_view(run: Run, traces: Path) -> None:
    result = run("report", str(traces), "--view", "kernels", "--columns", "rank,name,total_us", "-o", "json")
    rows = [{"rank": 0, "name": "gemm", "total_us": 60.0}, {"rank": 1, "name": "gemm", "total_us": 120.0}]
    document = result.json()["kernels"]
    assert (document["rows"], document["notes"]) == (rows, [])
    assert document["columns"][2]["unit"] == "us"


def test_people_read_places_from_the_package_on_and_programs_whole_paths(run: Run, tmp_path: Path) -> None:
    export_trace(sampled_trace([(*MAIN, SITE + "a/b.py(7): f")] * 20, steps=2), tmp_path / "trace.json.gz")
    command = ("report", str(tmp_path / "trace.json.gz"), "--view", "python_samples", "--columns", "function")
    assert run(*command).stdout == "FUNCTION\na/b.py(7): f\n"
    assert run(*command, "-o", "json").json()["python_samples"]["rows"] == [{"function": SITE + "a/b.py(7): f"}]
    command = ("report", str(tmp_path / "trace.json.gz"), "--view", "time_causes", "--columns", "what")
    assert run(*command).stdout.startswith("WHAT\nmain (train.py:42)\n")
    assert run(*command, "-o", "json").json()["time_causes"]["rows"] == [{"what": "main (/job/train.py:42)"}]


def test_csv_has_names_with_units(run: Run, traces: Path) -> None:
    result = run("report", str(traces / "rank1"), "--view", "kernels", "--columns", "name,total_us", "-o", "csv")
    assert list(csv.reader(io.StringIO(result.stdout))) == [["name", "total_us"], ["gemm", "120.0"]]


def test_csv_of_several_views_is_refused(run: Run, traces: Path) -> None:
    result = run("report", str(traces / "rank0"), "--view", "kernels", "--view", "operators", "-o", "csv")
    assert result.code == 2
    assert "CSV can only hold one table" in result.stderr


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json"])
def test_a_file_is_written_by_its_suffix(run: Run, traces: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"kernels.{suffix}"
    result = run("report", str(traces / "rank0"), "--view", "kernels", "--columns", "name,calls", "-o", str(path))
    assert (result.code, result.stdout) == (0, "")
    assert f"{path}: 1 row\n" in result.stderr
    if suffix == "parquet":
        assert pq.read_table(path).to_pylist() == [{"name": "gemm", "calls": 2}]
    elif suffix == "csv":
        assert path.read_text() == "name,calls\ngemm,2\n"
    else:
        assert json.loads(path.read_text())["kernels"]["rows"] == [{"name": "gemm", "calls": 2}]


def test_a_folder_that_is_missing_is_a_clear_error(run: Run, traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "none" / "kernels.csv"
    result = run("report", str(traces / "rank0"), "--view", "kernels", "-o", str(path))
    first, advice = result.stderr.splitlines()
    assert (result.code, first) == (5, f"error: cannot write {path}: No such file or directory")
    assert advice == "Check the folder with `ls -ld` and `df -h`, or choose another one."


def test_another_suffix_is_refused(run: Run) -> None:
    result = run("report", "x", "-o", "kernels.xlsx")
    assert result.code == 2
    assert "--output: expected table, wide, json, yaml, csv, or a file ending in .csv, .json, .parquet" in result.stderr


def test_limit_cuts_tables_and_says_so(run: Run, traces: Path) -> None:
    result = run("report", str(traces), "--view", "kernels", "--columns", "rank,name", "--limit", "1")
    assert result.stdout == "RANK  NAME\n   0  gemm\n… 1 more row (--limit 0 shows all)\n"


def test_list_names_every_view_with_a_line(run: Run) -> None:
    lines = run("report", "--list").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == sorted(VIEWS)
    assert {row["name"] for row in run("report", "--list", "-o", "json").json()} == set(VIEWS)


def test_describe_shows_rules_options_and_columns(run: Run) -> None:
    stdout = run("report", "--view", "idle_breakdown", "--describe").stdout
    assert stdout.startswith("idle_breakdown\n\n  The gaps between")
    assert "  consecutive_kernel_delay = 30: a number\n" in stdout
    assert "supports --compat: hta\n" in stdout
    assert "idle_us" in stdout


def test_recommendations_are_sentences_below_their_figures(run: Run, traces: Path) -> None:
    lines = run("report", str(traces / "rank0"), "--view", "recommendations").stdout.splitlines()
    assert lines[0] == "low_utilization  value 30.0%, threshold 50.0%"
    assert lines[1].startswith("    Give the GPU more work")


def test_a_table_of_one_trace_has_no_rank_but_that_of_several_has(run: Run, traces: Path) -> None:
    assert run("report", str(traces / "rank0"), "--view", "kernels").stdout.startswith("NAME")
    assert run("report", str(traces), "--view", "kernels").stdout.startswith("RANK  NAME")


def test_describe_of_a_column_says_its_unit_and_definition_and_the_rules_of_its_view(run: Run) -> None:
    for name in ("time_causes.share_pct", "time_causes.share", "time causes.SHARE %"):
        result = run("report", "--describe", "--view", name)
        assert result.stdout.startswith(
            "time_causes.share_pct\n\n  float [%]: share of the time of all measured steps (or of the trace)\n\n"
            "time_causes\n\n  Where every nanosecond of the steps goes"
        )
    assert run("report", "--describe", "--view", "idle_causes.OP TIME").stdout.startswith("idle_causes.op_us\n")
    (document,) = run("report", "--describe", "--view", "overview.step_us", "-o", "json").json()
    assert [(column["name"], column["unit"]) for column in document["columns"]] == [("step_us", "us")]
    unknown = run("report", "--describe", "--view", "overview.stepp")
    assert (unknown.code, unknown.stderr.startswith("error: view overview has no column stepp; its columns are: ")) == (
        2,
        True,
    )


def test_describe_without_a_view_describes_those_of_the_report_of_these_traces(run: Run, traces: Path) -> None:
    def named(*arguments: str) -> list[str]:
        return [document["name"] for document in run("report", "--describe", "-o", "json", *arguments).json()]

    assert named() == named(str(traces / "rank0")) == list(OVERVIEW)
    assert named(str(traces)) == list(JOB_OVERVIEW)
    assert named("--compat", "plugin") == list(PLUGIN_OVERVIEW)


def test_the_report_says_what_the_trace_lacks_and_how_a_figure_is_explained(run: Run, traces: Path) -> None:
    stdout = run("report", str(traces / "rank0")).stdout
    (line,) = (line for line in stdout.splitlines() if line.startswith("Python stacks"))
    assert [text for text in line.split("  ") if text][1].strip() == "kinetoctl trace --with-stack"
    assert stdout.index("\nWhat to change (findings)\n") < stdout.index(NOT_RECORDED) < stdout.index("\nOverview\n")
    assert stdout.endswith("\nkinetoctl report --describe --view VIEW.COLUMN explains a column\n")
    rows = run("report", str(traces / "rank0"), "-o", "json").json()["not_recorded"]["rows"]
    assert "kinetoctl trace --memory" in [row["option"] for row in rows]


def test_a_trace_that_lacks_nothing_has_no_empty_table_for_people_but_an_answer_for_programs(
    run: Run, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(_context: object) -> list[object]:
        return []

    monkeypatch.setitem(VIEWS, "not_recorded", replace(VIEWS["not_recorded"], function=complete))
    assert NOT_RECORDED not in run("report", str(traces / "rank0")).stdout
    document = run("report", str(traces / "rank0"), "-o", "json").json()["not_recorded"]
    assert (document["rows"], document["notes"]) == ([], ["the trace has everything that the report uses"])


def test_without_a_gpu_the_report_begins_with_what_it_knows_and_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    save_columns(trace({"cpu_op": [{"name": "aten::mm", "duration": 5, "thread": 1}]}), tmp_path / "cpu")
    stdout = run("report", str(tmp_path / "cpu")).stdout
    verdict, bar, rest = stdout.split("\n\n", 2)
    title = rest.splitlines()[0]
    assert verdict.startswith("100 % of the recorded time is everything else: your own Python code, or waits in it. ")
    assert bar == f"{80 * '█'}\n█ 100 % host other"
    assert title == "Where the step time goes, by GPU (time_causes)"
    assert "\n 100.0%" in stdout
    assert "\nGPU activities  kinetoctl trace with its defaults " in stdout
    assert "\nKernels\n" not in stdout
    (cause,) = run("report", str(tmp_path / "cpu"), "-o", "json").json()["time_causes"]["rows"]
    assert (cause["cause"], cause["share_pct"]) == ("host_other", 100)


def test_runs_of_a_program_are_compared_and_the_newest_is_reported(run: Run, tmp_path: Path) -> None:
    names = ("a.json", "b.json")
    for name, start_s, step_us in zip(names, (1_000, 2_000), (50, 100), strict=True):
        (tmp_path / name).write_text(json.dumps(steps_of(1e6 * start_s, step_us)))
    result = run("report", *(str(tmp_path / name) for name in names))
    lines = result.stdout.splitlines()
    assert lines[0].startswith("A step takes 100 µs on average. ")
    title = lines.index("Runs")
    assert [line.split()[0] for line in lines[title + 1 : title + 4]] == ["TRACE", "b.json", "a.json"]
    told = (
        "note: These are 2 consecutive runs, not ranks of one job: a step of the newest run takes 100 µs, "
        f"100 % more than in the run before. `kinetoctl diff {tmp_path}/a.json {tmp_path}/b.json` compares the last "
        "two. The rest of this report is about the newest one."
    )
    assert told in lines and "Ranks" not in lines
    documents = run("report", str(tmp_path), "-o", "json").json()
    assert [row["change_pct"] for row in documents["runs"]["rows"]] == [pytest.approx(100), None]
    assert "rank_time_causes" not in documents


def test_views_of_runs_of_a_program_are_by_run_and_name_no_ranks(run: Run, tmp_path: Path) -> None:
    for name, start_s, step_us in (("a.json", 1_000, 50), ("b.json", 2_000, 100)):
        (tmp_path / name).write_text(json.dumps(steps_of(1e6 * start_s, step_us)))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    documents = run("report", *files, "--view", "kernels", "--view", "rank_time_causes", "-o", "json").json()
    assert [(row["run"], row["total_us"]) for row in documents["kernels"]["rows"]] == [("b.json", 150), ("a.json", 75)]
    assert {row["run"] for row in documents["rank_time_causes"]["rows"]} == {"a.json", "b.json"}
    result = run("report", *files, "--view", "overview")
    assert (result.code, result.stdout.split()[0], "rank" in result.stdout.lower().replace("not ranks", "")) == (
        0,
        "RUN",
        False,
    )
    assert (
        "note: These are 2 consecutive runs, not ranks of one job. "
        f"`kinetoctl diff {files[0]} {files[1]}` compares the last two. Each has its own rows, the newest first.\n"
    ) in result.stdout


def test_of_each_run_of_a_program_as_many_rows_are_shown(run: Run, tmp_path: Path) -> None:
    for name, start_s in (("a.json", 1_000), ("b.json", 2_000)):
        trace = steps_of(1e6 * start_s, 50)
        for event in trace["traceEvents"][1::2]:
            event["name"] = f"gemm at {event['ts']}"
        (tmp_path / name).write_text(json.dumps(trace))
    command = ("report", str(tmp_path), "--view", "kernels", "--columns", "run")
    assert run(*command).stdout.split("note: ")[0].split() == ["RUN", *["b.json"] * 3, *["a.json"] * 3]
    result = run(*command, "--limit", "2")
    assert result.stdout.split("note: ")[0].split() == ["RUN", *["b.json"] * 2, *["a.json"] * 2]
    assert result.stdout.splitlines()[6:8] == [
        f"note: {name}: 1 more row of kernels (--limit 0 shows all)" for name in ("b.json", "a.json")
    ]
    rows = run(*command, "--limit", "1", "-o", "json").json()["kernels"]["rows"]
    assert rows == [{"run": "b.json"}, {"run": "a.json"}]


def test_a_truncated_file_has_no_verdict_on_the_time_and_is_a_part(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_text(json.dumps(steps_of(1_000, 50))[:-100])
    result = run("report", str(file))
    assert result.code == run("report", str(file), "--view", "kernels").code == 4
    assert " ".join(result.stdout.splitlines()[:3]).startswith(
        "The file is truncated in the middle of an event, after 5 events of an unknown number. Entire kinds of "
        "activity may be missing, so the shares of the time are unreliable: "
    )
    documents = run("report", str(file), "-o", "json").json()
    assert [len(documents[name]["rows"]) for name in ("time_causes", "findings", "overview", "kernels")] == [0, 0, 0, 1]
    assert "█" not in result.stdout


def test_a_job_says_what_the_time_of_each_rank_went_to_and_of_all_together(run: Run, traces: Path) -> None:
    documents = run("report", str(traces), "-o", "json").json()
    assert sum(row["share_pct"] for row in documents["rank_time_causes"]["rows"]) == pytest.approx(100)
    for rank in (0, 1):
        shares = [row["share_pct"] for row in documents["time_causes"]["rows"] if row["rank"] == rank]
        assert sum(shares) == pytest.approx(100)
    stdout = run("report", str(traces)).stdout
    assert documents["verdict"]["rows"][0]["verdict"].startswith("A step takes 100 µs on average on each of 2 ranks. ")
    places = [stdout.index(f"({name})\n") for name in ("rank_time_causes", "findings", "rank_what_if", "time_causes")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "name a trace"),
        (["/no/such.json"], 3, "there is no file /no/such.json\n"),
        (["/no/such*.json"], 3, "no file matches /no/such*.json\n"),
        (["TRACE", "--view", "kernls"], 2, "no view is called 'kernls'; did you mean kernels"),
        (["TRACE", "--view", "qqqq"], 2, "no view is called 'qqqq'; kinetoctl report --list shows all views"),
        (["TRACE", "--view", "kernels", "--set", "depth=3"], 2, "none of the requested views has the option"),
        (
            ["TRACE", "--view", "kernels", "--columns", "nam"],
            2,
            "view kernels has no column nam; its columns are: rank, ",
        ),
        (["TRACE", "--view", "critical_path", "--compat", "plugin"], 2, "cannot reproduce the figures of plugin"),
        (["BROKEN", "--view", "kernels"], 5, "is not a trace"),
        (["TRACE", "--workers", "2", "--scheduler", "tcp://127.0.0.1:1"], 2, "cannot be combined"),
    ],
)
def test_errors_name_what_is_wrong(
    run: Run, traces: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("no trace")
    places = {"TRACE": str(traces / "rank0"), "BROKEN": str(broken)}
    result = run("report", *(places.get(argument, argument) for argument in arguments))
    assert (result.code, message in result.stderr) == (code, True), result.stderr


def test_html_writes_one_page(run: Run, traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = run("report", str(traces), "--html", str(path))
    assert (result.code, result.stdout) == (0, "")
    assert result.stderr.startswith(f"{path} ("), result.stderr
    assert path.read_text().startswith("<!DOCTYPE html>")


@pytest.fixture
def broken_findings(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the view of the findings fail; returns what is to be said."""

    def broken(_context: object, *, top: int = 10) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setitem(VIEWS, "findings", replace(VIEWS["findings"], function=broken))
    return "ZeroDivisionError: division by zero (test_report.py:"


def test_a_view_that_fails_is_a_row_of_the_report_and_the_rest_is_complete(
    run: Run, traces: Path, broken_findings: str
) -> None:
    result = run("report", str(traces / "rank0"))
    assert result.code == 4
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("view findings failed: "))
    assert broken_findings in line and line.endswith("; the other views are complete")
    assert "\nKernels\n" in result.stdout and "gemm" in result.stdout
    result = run("report", str(traces / "rank0"), "-o", "json")
    document = result.json()
    assert (result.code, document["findings"]["rows"], len(document["kernels"]["rows"])) == (4, [], 1)
    assert broken_findings in document["findings"]["failure"]
    assert "failure" not in document["kernels"]
    assert f"note: {document['findings']['failure']}" in result.stderr


def test_a_page_says_which_view_failed(run: Run, traces: Path, tmp_path: Path, broken_findings: str) -> None:
    path = tmp_path / "report.html"
    assert run("report", str(traces / "rank0"), "--html", str(path)).code == 4
    text = path.read_text()
    assert broken_findings in text and "gemm" in text
    assert "Found nothing that would save" not in text


def test_html_has_views_of_its_own(run: Run, traces: Path, tmp_path: Path) -> None:
    assert run("report", str(traces), "--html", str(tmp_path / "r.html"), "--view", "kernels").code == 2


def test_a_trace_that_cannot_be_read_is_missing_and_the_exit_code_says_so(
    run: Run, traces: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "rank7.json"
    broken.write_text("no trace")
    result = run("report", str(traces), str(broken), "--view", "kernels", "-o", "json")
    assert (result.code, [row["rank"] for row in result.json()["kernels"]["rows"]]) == (4, [0, 1])
    assert "note: rank 7 is missing: " in result.stderr


@pytest.mark.slow
def test_several_processes_give_what_one_gives_and_none_imports_pandas(run: Run, traces: Path) -> None:
    alone = run("report", str(traces), "--view", "kernels", "-o", "json").json()
    arguments = ["report", str(traces), "--view", "kernels", "--workers", "2", "-o", "json"]
    done = run_process(arguments, environment(PYTHONPROFILEIMPORTTIME="1"))
    assert done.json() == alone
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pyarrow.lib" in imported
    assert "pandas.core.api" not in imported


def test_help_of_all_commands_imports_nothing_big() -> None:
    code = (
        "import sys; from kinetoctl.app import cli; import click\n"
        "context = click.Context(cli)\n"
        "[cli.get_command(context, name) for name in ('report', 'diff', 'query', 'open', 'export')]\n"
        "print(sorted({'numpy', 'pyarrow', 'duckdb', 'grpc'} & set(sys.modules)))"
    )
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=scaled(60)
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_job_of_many_ranks_says_who_is_slow_and_each_finding_once(run: Run, tmp_path: Path) -> None:
    write_job(tmp_path, Job(ranks=6, per_host=3, steps=2, layers=2, slow={5: 1.2}))
    result = run("report", str(tmp_path))
    assert result.code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("A step takes 1.53 ms on average on each of 6 ranks. Transfers between ranks are not")
    titles = [lines.index(line) for line in ("What to change (findings)", NOT_RECORDED.strip(), "Ranks")]
    assert titles == sorted(titles)
    ranks = lines[titles[-1] + 2]
    assert ranks.split()[0] == "5" and "slow: it computes" in ranks
    title = "Transfers between ranks are not hidden behind computation (on 6 of 6 ranks)"
    assert sum(title in line for line in lines) == 1
    assert "note: ranks 0-5: the savings overlap, so do not add them up" in lines


def test_findings_of_a_job_are_the_same_in_the_report_and_by_their_view(run: Run, tmp_path: Path) -> None:
    write_job(tmp_path, Job(ranks=3, per_host=3, steps=2, layers=2, slow={2: 1.2}))
    overview, alone = (
        run("report", str(tmp_path), *more, "-o", "json").json() for more in ((), ("--view", "findings"))
    )
    assert list(alone) == ["findings"]
    assert alone["findings"]["rows"] == overview["findings"]["rows"] != []
    shown = run("report", str(tmp_path)).stdout
    more = len(alone["findings"]["rows"]) - TOP_FINDINGS
    assert more <= 0 or f"note: {more} more: kinetoctl report --view findings\n" in shown


def test_a_url_is_read_like_a_folder_and_a_missing_rank_makes_a_part(run: Run, tmp_path: Path) -> None:
    url = upload(f"file://{tmp_path}/bucket/h0/c0", tmp_path, {0: 10, 1: 20}, fleet="f1", lost=[2])
    wanted = ("--view", "kernels", "--columns", "rank,total_us", "-o", "json")
    result = run("report", f"file://{tmp_path}/bucket", "--fleet", "f1", *wanted)
    assert result.code == 4
    found = result.json()["kernels"]
    assert found["rows"] == [{"rank": 0, "total_us": 20.0}, {"rank": 1, "total_us": 40.0}]
    assert found["notes"] == [
        f"rank 2 is missing: {url}/102-7000000002: its capture ended as FAILED: the process ended"
    ]
    assert run("report", f"file://{tmp_path}/bucket", "--fleet", "f2", *wanted).code == 5


def test_commands_that_need_the_files_fetch_them_first(run: Run, tmp_path: Path) -> None:
    url = upload(f"file://{tmp_path}/bucket/h0/c0", tmp_path, {3: 10})
    result = run("query", "SELECT rank, count(*) AS kernels FROM kernel GROUP BY rank", url, "-o", "csv")
    assert (result.code, result.stdout) == (0, "rank,kernels\n3,2\n")
    assert result.stderr == f"fetching {url}/103-7000000003\n"
    result = run("export", url, "-o", str(tmp_path / "x.json"))
    assert result.code == 0
    assert (tmp_path / "x.json").stat().st_size > 0


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


def test_a_snapshot_gives_its_devices_stacks_and_failures(file: Path, run: Run) -> None:
    result = run("report", str(file))
    assert (result.code, result.stderr) == (0, "")
    for title in ("Snapshot devices\n", "Snapshot stacks\n", "Snapshot ooms\n", "step (train.py:12)", "45.5%"):
        assert title in result.stdout
    assert "--describe" not in result.stdout


def test_without_failures_there_is_no_table_of_them(tmp_path: Path, run: Run) -> None:
    file = write_snapshot(tmp_path / "x.pickle", {"segments": []})
    assert "ooms" not in run("report", str(file)).stdout


def test_json_is_exact(file: Path, run: Run) -> None:
    found = run("report", str(file), "-o", "json").json()
    assert list(found) == ["snapshot_devices", "snapshot_stacks", "snapshot_ooms"]
    assert found["snapshot_devices"]["rows"][0]["reserved_bytes"] == 22 * MIB


def test_views_columns_and_limits_can_be_chosen(file: Path, run: Run) -> None:
    chosen = ("--view", "snapshot_blocks", "--columns", "state,block_bytes", "--limit", "2", "-o", "csv")
    assert run("report", str(file), *chosen).stdout == f"state,block_bytes\nactive,{4 * MIB}\nawaiting free,{2 * MIB}\n"


def test_several_snapshots_are_told_apart(file: Path, run: Run) -> None:
    write_snapshot(file.with_name("other.pickle"))
    result = run("report", str(file.parent / "*.pickle"), "-o", "json")
    rows = result.json()["snapshot_devices"]["rows"]
    assert [row["process"] for row in rows] == ["kineto-gpu7-42-x", "other"]


def test_the_snapshot_of_a_capture_is_fetched(server: FakeServer, run: Run) -> None:
    result = run("report", "--address", server.address, "--view", "snapshot_devices", "-o", "json", CAPTURE)
    assert result.json()["snapshot_devices"]["rows"][0]["segments"] == 2


def test_a_capture_without_a_trace_says_how_to_see_its_snapshot(server: FakeServer, run: Run) -> None:
    result = run("report", "--address", server.address, CAPTURE)
    assert result.code == 3
    assert "has no trace, only a memory snapshot: `kinetoctl report --view snapshot_devices" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--view", "snapshot_x"), 2, "a memory snapshot has no view snapshot_x; its views are snapshot_devices"),
        (("--html", "x.html"), 2, "`kinetoctl web FILE` shows charts of them"),
        (("--set", "a=b"), 2, "--html, --compat and --set do not apply to memory snapshots"),
        (("--columns", "nothing"), 2, "has no column nothing"),
        (("--view", "kernels"), 5, "is a pickle, not a trace: if it is a memory snapshot, pass only snapshots"),
    ],
)
def test_what_a_snapshot_has_not_is_said(
    file: Path, run: Run, arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = run("report", *arguments, str(file))
    assert (result.code, said in result.stderr + result.stdout) == (code, True), result.stderr


def test_a_hostile_pickle_is_refused(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "x.pickle"
    file.write_bytes(pickle.dumps(print, protocol=4))
    result = run("report", str(file))
    assert result.code == 5
    assert "x.pickle is not plain data: it imports something at byte" in result.stderr


def test_a_trace_without_one_is_said(tmp_path: Path, run: Run) -> None:
    result = run("report", "--view", "snapshot_devices", str(tmp_path))
    assert (result.code, "there is no memory snapshot at" in result.stderr) == (3, True)
