"""`kinetoctl diff` over small stored traces."""

import xml.etree.ElementTree as Xml
from dataclasses import replace
from pathlib import Path

import pytest
from kineto_trace.analysis.diff.diff_views import diff_ops
from kineto_trace.analysis.diff.view_differences import Check, CheckOutcome
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.store.parquet_folder import save_columns
from kinetoctl.commands.diff import markdown, write_junit
from kinetoctl.exit_codes import ExitCode
from support.service.cli import Run, run_here
from support.service.stored import store
from support.trace_files.sampled_stacks import MAIN, sampled_trace
from support.trace_files.step_traces import context, noisy, stepped


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_here(capsys, "unix:/nowhere.sock", "diff", *map(str, arguments))


def save(folder: Path, name: str, mm_us: float, seed: int, *, rank: int | None = None, steps: int = 8) -> Path:
    ops = {"aten::mm": noisy(mm_us, steps, seed), "aten::add": noisy(500, steps, seed + 1)}
    path = folder / name
    save_columns(stepped(ops, {"gemm": noisy(mm_us / 2, steps, seed + 2)}, rank=rank), path)
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    save(folder, "before", 9000, 1)
    save(folder, "same", 9000, 11, steps=20)
    save(folder, "slow", 11_000, 21)
    save(folder, "short", 9000, 31, steps=1)
    for job, ranks, mm_us in (("old", (0, 1, 2), 9000), ("new", (1, 2, 3), 10_500)):
        for rank in ranks:
            save(folder / job, f"rank{rank}", mm_us, 100 + rank, rank=rank)
    return folder


def test_a_longer_trace_of_the_same_program_shows_no_change(run: Run, traces: Path) -> None:
    result = run(traces / "before", traces / "same")
    assert result.code == 0
    assert result.stdout.startswith("typical step time: ")  # the mean of what is left of 20 steps, unlike `report`'s
    assert "; means exclude the slowest and the fastest tenth of the steps" in result.stdout
    assert "per step" in result.stdout and ": within noise\n" in result.stdout.splitlines(keepends=True)[0]
    ops = result.stdout[result.stdout.index("\nops\n") :]
    assert ops.startswith("\nops\n(nothing)\nnote: 3 rows are within the noise (--all shows them)\n")
    assert "aten::mm" in run(traces / "before", traces / "same", "--all").stdout


def test_a_truncated_trace_is_compared_in_part_and_judged_by_no_check(run: Run, traces: Path, tmp_path: Path) -> None:
    note = "the file is truncated in its list of events, after 9 of about 12 events"
    save_columns(replace(open_trace(traces / "slow"), notes=(note,)), tmp_path / "cut")
    result = run(traces / "before", tmp_path / "cut")
    assert (result.code, f"note: other trace: {note}\n" in result.stdout) == (4, True)
    junit = tmp_path / "diff.xml"
    limits = ("--fail-on", "5%", "--fail-on", "ops=5%")
    result = run(*limits, "--junit", junit, "-o", "json", traces / "before", tmp_path / "cut")
    told = f"steps: other trace: {note}; ops: other trace: {note}"
    assert (result.code, f"error: --fail-on: no verdict is possible: {told}\n" in result.stderr) == (5, True)
    assert f"unknown: steps: step: other trace: {note}\n" in result.stderr
    checks = result.json()["checks"]["rows"]
    assert (len(checks), {(check["outcome"], check["message"]) for check in checks}) == (
        3,
        {("unknown", f"other trace: {note}")},
    )
    suites = Xml.parse(junit).getroot()
    assert [(suite.attrib["failures"], suite.attrib["errors"]) for suite in suites] == [("0", "1"), ("0", "2")]


def test_where_a_side_stands_still_the_report_s_sentence_comes_first(run: Run, traces: Path, tmp_path: Path) -> None:
    save_columns(sampled_trace([(MAIN, "idle idle_lock")] * 50, steps=0, pid=1), tmp_path / "hung")
    sentence = "In OTHER, nothing moved: the main thread waits for a lock in main (train.py:42)."
    result = run(traces / "before", tmp_path / "hung")
    assert (result.code, result.stdout.count(sentence)) == (0, 1)
    assert result.stdout.startswith(f"{sentence}\n")
    assert sentence in run(traces / "before", tmp_path / "hung", "-o", "json").json()["steps"]["notes"]
    assert run(tmp_path / "hung", traces / "before").stdout.startswith(sentence.replace("OTHER", "BASELINE"))
    assert "nothing moved" not in run(traces / "before", traces / "slow").stdout


def test_of_few_steps_none_is_left_out(run: Run, traces: Path) -> None:
    result = run(traces / "before", traces / "slow")
    assert (result.stdout.startswith("step time: "), "leave out" in result.stdout) == (True, False)


def test_other_formats_have_every_row_with_its_interval(run: Run, traces: Path) -> None:
    rows = run(traces / "before", traces / "slow", "--by", "ops", "-o", "json").json()["ops"]["rows"]
    assert [(row["name"], row["time"], row["verdict"]) for row in rows] == [
        ("aten::mm", "host", "slower"),
        ("(no operator)", "gpu", "slower"),
        ("aten::add", "host", "within noise"),
    ]
    assert 0 < rows[0]["delta_low_us"] < rows[0]["delta_us"] < rows[0]["delta_high_us"]


def test_a_slower_step_fails_with_an_exit_code_of_its_own(run: Run, traces: Path) -> None:
    result = run("--fail-on", "5%", traces / "before", traces / "slow")
    assert (result.code, int(ExitCode.REGRESSED)) == (9, 9)
    assert result.stderr.startswith("failed: steps: step: ")
    assert run("--fail-on", "40%", traces / "before", traces / "slow").code == 0
    assert run("--fail-on", "5", traces / "slow", traces / "before").code == 0
    assert run("--fail-on", "2%", traces / "before", traces / "same").code == 0


def test_rows_of_a_view_can_have_a_limit(run: Run, traces: Path) -> None:
    result = run("--by", "steps", "--fail-on", "kernels=10%", traces / "before", traces / "slow")
    assert (result.code, result.stderr.startswith("failed: kernels: gemm (gpu time): ")) == (9, True)
    assert run("--fail-on", "ops=50%", traces / "before", traces / "slow").code == 0


def test_what_cannot_be_judged_is_an_error(run: Run, traces: Path) -> None:
    result = run("--fail-on", "5%", traces / "before", traces / "short")
    assert (result.code, "error: --fail-on: no verdict is possible: steps: 1 of 1 rows: " in result.stderr) == (5, True)


def test_noise_that_would_hide_the_limit_does_not_pass_in_any_output(
    run: Run, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junit, summary = tmp_path / "diff.xml", tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    wanted = ("--fail-on", "1%", "--junit", junit, "--github-summary")
    result = run(*wanted, "-o", "json", traces / "before", traces / "same")
    hides = "cannot be judged: the noise would hide a regression of 1 %; record more steps"
    assert (result.code, f"{hides}\n" in result.stderr) == (5, True)
    (check,) = result.json()["checks"]["rows"]
    assert (check["compared"], check["row"], check["outcome"]) == ("steps", "step", "unknown")
    assert check["message"].endswith(hides)
    (suite,) = Xml.parse(junit).getroot()
    assert (suite.attrib["errors"], suite[0][0].tag) == ("1", "error")
    assert suite[0][0].attrib["message"].endswith(hides)
    assert f"- **unknown** steps: `step` {check['message'][:5]}" in summary.read_text()


@pytest.mark.parametrize("text", ["", "five", "-5%", "5%%", "tree=5%", "ops=", "nan%"])
def test_limits_that_are_none_are_refused(run: Run, traces: Path, text: str) -> None:
    result = run("--fail-on", text, traces / "before", traces / "slow")
    assert (result.code, "is not a limit; use, for example, 5%" in result.stderr) == (2, True)


def test_checks_are_cases_of_junit(run: Run, traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "diff.xml"
    run("--fail-on", "5%", "--fail-on", "ops=50%", "--junit", path, traces / "before", traces / "slow")
    steps, ops = Xml.parse(path).getroot()
    assert (steps.attrib, steps[0].attrib) == (
        {"name": "kinetoctl diff steps", "tests": "1", "failures": "1", "errors": "0"},
        {"classname": "kinetoctl.diff.steps", "name": "step"},
    )
    assert steps[0][0].tag == "failure" and steps[0][0].attrib["message"].endswith(": slower")
    assert (ops.attrib["failures"], ops[0][0].tag) == ("0", "system-out")
    run("--fail-on", "5%", "--junit", path, traces / "before", traces / "short")
    assert Xml.parse(path).getroot()[0].attrib["errors"] == "1"


def test_junit_without_checks_is_refused(run: Run, traces: Path, tmp_path: Path) -> None:
    result = run("--junit", tmp_path / "x.xml", traces / "before", traces / "slow")
    assert (result.code, "--junit writes the checks of --fail-on" in result.stderr) == (2, True)
    assert not (tmp_path / "x.xml").exists()


def test_a_summary_is_added_to_the_one_of_github(
    run: Run, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.md"
    path.write_text("earlier step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    run("--github-summary", "--fail-on", "5%", traces / "before", traces / "slow")
    text = path.read_text()
    assert text.startswith("earlier step\n## kinetoctl diff\n")
    assert "- **failed** steps: `step` " in text
    assert "\n| `gemm` | gpu | slower | " in text
    copy = tmp_path / "copy.md"
    run("--markdown", copy, "--fail-on", "5%", traces / "before", traces / "slow")
    assert copy.read_text() == text.removeprefix("earlier step\n")


def test_a_summary_without_github_is_refused(run: Run, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    result = run("--github-summary", traces / "before", traces / "slow")
    assert (result.code, "needs the variable GITHUB_STEP_SUMMARY" in result.stderr) == (2, True)


def test_jobs_are_compared_rank_by_rank_and_missing_ranks_are_named(run: Run, traces: Path) -> None:
    result = run(traces / "old", traces / "new", "-o", "json")
    document = result.json()
    assert result.code == ExitCode.PARTIAL
    assert [(row["name"], row["verdict"]) for row in document["ranks"]["rows"]] == [
        ("rank 1", "slower"),
        ("rank 2", "slower"),
    ]
    assert document["ranks"]["notes"] == [
        "rank 0 is missing in the other job: not compared",
        "rank 3 is missing in the baseline: not compared",
    ]
    assert document["ops"]["rows"][0]["verdict"] == "slower"
    assert run("--fail-on", "5%", traces / "old", traces / "new").code == ExitCode.REGRESSED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--by", "ops", "--path", "0", "--fail-on", "ops=5%"), "--fail-on checks times per step"),
        (("--by", "ops", "--compat", "plugin", "--fail-on", "ops=5%"), "--fail-on checks times per step"),
        (("--by", "kernels", "--total"), "--total only applies to --by ops, modules, paths"),
    ],
)
def test_options_that_do_not_fit_are_refused(run: Run, traces: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, traces / "before", traces / "slow")
    assert (result.code, message in result.stderr) == (2, True)


def test_limits_go_with_the_tree_and_totals(run: Run, traces: Path) -> None:
    assert run("--by", "tree", "--fail-on", "5%", traces / "before", traces / "slow").code == ExitCode.REGRESSED
    assert run("--by", "ops", "--total", traces / "before", traces / "slow").code == 0


def test_jobs_without_a_common_rank_are_refused(run: Run, traces: Path) -> None:
    result = run(traces / "old" / "rank0", traces / "new")
    assert (result.code, "the two jobs have no rank in common: 0 versus 1, 2, 3" in result.stderr) == (2, True)
    assert run(traces / "old" / "rank0", traces / "new" / "rank3").code == 0  # two traces alone


def test_a_rank_of_a_job_is_compared_with_another_one(run: Run, traces: Path, tmp_path: Path) -> None:
    save(tmp_path, "rank0", 9000, 1, rank=0)
    save(tmp_path, "rank1", 11_000, 21, rank=1)
    both = (tmp_path, tmp_path, "--by", "ops", "-o", "json")
    rows = run(*both, "--rank", "1", "--base-rank", "0").json()["ops"]["rows"]
    assert (rows[0]["name"], rows[0]["verdict"]) == ("aten::mm", "slower")
    rows = run(*both, "--rank", "0", "--base-rank", "0").json()["ops"]["rows"]
    assert {row["delta_us"] for row in rows} == {0.0}
    every = run(tmp_path, tmp_path, "--by", "steps", "--base-rank", "0", "-o", "json").json()
    assert [row["name"] for row in every["ranks"]["rows"]] == ["rank 0", "rank 1"]
    assert every["ranks"]["rows"][1]["verdict"] == "slower"
    result = run(tmp_path, tmp_path, "--base-rank", "7")
    assert (result.code, "has no trace of rank 7; its ranks are: 0, 1" in result.stderr) == (ExitCode.USAGE, True)


def test_the_rows_of_a_view_are_compared(run: Run, traces: Path) -> None:
    both = traces / "before", traces / "slow"
    found = run(*both, "--view", "profiler_steps", "--view", "gpu_annotations", "-o", "json").json()
    assert list(found) == ["profiler_steps_difference", "gpu_annotations_difference"]
    (row,) = found["profiler_steps_difference"]["rows"]
    assert (row["duration_verdict"], row["duration_delta_us"] > 1000) == ("longer", True)
    every = run(traces / "old", traces / "new", "--view", "profiler_steps", "-o", "json")
    assert {row["rank"] for row in every.json()["profiler_steps_difference"]["rows"]} == {1, 2}
    assert every.code == ExitCode.PARTIAL
    assert list(run(*both, "--by", "steps", "--view", "overview", "-o", "json").json()) == [
        "steps",
        "overview_difference",
    ]


def test_views_that_cannot_be_compared_like_that_are_refused(run: Run, traces: Path) -> None:
    both = traces / "before", traces / "slow"
    assert "which have no counterparts in another trace" in run(*both, "--view", "memory_events").stderr
    result = run(*both, "--view", "kernels")
    assert (result.code, "use --by kernels" in result.stderr) == (ExitCode.USAGE, True)
    assert "--set only applies to --view" in run(*both, "--set", "least=1").stderr


def test_the_tree_leads_into_a_node_and_to_its_operators(run: Run, tmp_path: Path) -> None:
    both = store(tmp_path / "rank0", rank=0), store(tmp_path / "rank1", rank=1, kernel_us=60)
    rows = run(*both, "--by", "tree", "-o", "json").json()["tree"]["rows"]
    assert [row["path"] for row in rows] == ["0", *(f"0-{place}" for place in range(rows[0]["children"]))]
    assert (rows[0]["device_baseline_us"], rows[0]["device_other_us"]) == (60.0, 120.0)
    (row,) = run(*both, "--by", "ops", "--path", "0", "-o", "json").json()["ops"]["rows"]
    assert (row["name"], row["device_total_other_us"]) == ("aten::mm", 120.0)
    assert run(*both, "--path", "0-9-9").code == 2
    assert "--path only applies to --by tree" in run(*both, "--path", "0", "--by", "kernels").stderr
    assert "--compat only applies to --by tree" in run(*both, "--compat", "plugin").stderr


def test_the_tree_of_a_job_is_refused(run: Run, traces: Path) -> None:
    result = run(traces / "old", traces / "before", "--by", "tree")
    assert result.code == 2


EVIL = "a|b`c`</code><script>\x1b[31m\nd"


def test_names_from_traces_stay_code_in_markdown() -> None:
    result = diff_ops(context({EVIL: noisy(100, 6, 1)}), context({EVIL: noisy(200, 6, 2)}))
    (line,) = [line for line in markdown({"ops": result}, {}).splitlines() if line.startswith("| ``")]
    assert line.startswith("| ``a\\|b`c`</code><script>\\x1b[31m\\x0ad`` | host | slower | ")


def test_names_from_traces_are_text_in_xml(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    write_junit({"ops": [Check(EVIL, CheckOutcome.FAILED, f"{EVIL} \ud800 \ufffe \x00")]}, path)
    ((case,),) = Xml.parse(path).getroot()
    assert case.attrib["name"] == "a|b`c`</code><script>\\x1b[31m\\x0ad"
    assert (case[0].text or "").endswith("\\ud800 \\ufffe \\x00")
