"""The other commands against a scripted daemon, and what all commands share."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import grpc
import pytest
import yaml
from kineto_protos.v1 import profiler_pb2 as pb
from support.service import captures
from support.service.captures import CONTENT
from support.service.cli import Run, environment, kinetoctl, run_here, run_process
from support.service.fake_profiler import Abort, FakeServer
from support.waiting import scaled

# kinetoctl, whose Tab takes its time here.
PATIENT = (
    "import sys; from kinetoctl.__main__ import main; from kinetoctl.options import completers;"
    "completers.COMPLETION_TIMEOUT_S = float(sys.argv.pop()); sys.exit(main())"
)


def finished() -> pb.Capture:
    capture = captures.capture(captures.done_target(), status=pb.CAPTURE_STATUS_DONE)
    capture.spec.labels["team"] = "vision"
    return capture


def test_ps_is_a_table_without_trailing_blanks(server: FakeServer, run: Run) -> None:
    other = pb.Process(
        pid=7, uid=1001, command=["python"], agent_state=pb.AGENT_STATE_NONE, iterations=-1, parent_pid=1
    )
    server.profiler.processes = [captures.process(), other]
    server.profiler.processes[0].start_time_ns = 0
    assert run("ps", "--all").stdout == (
        "PID   USER  RANK  GPU  AGE  ITER  PARENT  TRACE   COMMAND\n"
        "4242  ada   0     0    -    120   -       ready   python train.py --epochs 3\n"
        "7     1001  -     -    -    -     1       attach  python\n"
    )
    assert server.profiler.requests[0].include_without_agent


def test_ps_in_json_has_every_field(server: FakeServer, run: Run) -> None:
    server.profiler.processes = [captures.process(rank=None)]
    (document,) = run("ps", "-o", "json").json()
    assert document["rank"] is None
    assert document["agent_state"] == "AGENT_STATE_READY"
    assert document["job_id"] == ""
    assert document["start_time_ns"] == 4242


def test_ps_without_any_process_says_what_to_do(server: FakeServer, run: Run) -> None:
    result = run("ps")
    assert result.code == 0
    assert "`kinetoctl ps --all` lists every Python process, and `kinetoctl trace PID` traces any" in result.stderr


def test_ps_tells_how_a_process_would_be_traced_or_why_not(server: FakeServer, run: Run) -> None:
    attached, busy, stopped, old = (captures.process(pid=pid) for pid in (4, 5, 6, 7))
    attached.attached = busy.attached = True
    busy.agent_state = pb.AGENT_STATE_BUSY
    stopped.agent_state, stopped.obstacle = pb.AGENT_STATE_NONE, "stopped"
    old.agent_state = pb.AGENT_STATE_INCOMPATIBLE
    server.profiler.processes = [attached, busy, stopped, old]
    head, *rows = run("ps").stdout.splitlines()
    place = head.index("TRACE")
    shown = [row[place : head.index("COMMAND")].rstrip() for row in rows]
    assert shown == ["attached", "busy", "no: stopped", "no: agent of another version"]


def test_ps_wide_has_more_columns_and_columns_without_any_value_are_left_out(server: FakeServer, run: Run) -> None:
    process = captures.process()
    server.profiler.processes = [process]
    assert not {"JOB", "ITER/S", "FRAMEWORK", "POD"} & set(run("ps").stdout.split())
    process.job_id, process.iteration_ns, process.world_size = "831245", 40_000_000, 8
    head, row = run("ps").stdout.splitlines()
    assert head.split() == ["PID", "USER", "JOB", "RANK", "GPU", "AGE", "ITER", "ITER/S", "PARENT", "TRACE", "COMMAND"]
    assert "831245" in row and " 25 " in row
    process.iteration_ns, process.stalled_ns = 0, 300_000_000_000
    assert "none for 5 min" in run("ps").stdout
    head, row = run("ps", "-o", "wide").stdout.splitlines()
    assert {"WORLD", "STARTED", "FRAMEWORK", "PYTHON", "AGENT"} <= set(head.split())
    assert "torch 2.9.0" in row and "READY" in row


def test_ps_with_a_selector_that_matches_nothing_is_code_3(server: FakeServer, run: Run) -> None:
    assert run("ps", "--user", "bob").code == 3


def test_ps_asks_for_what_a_person_would_trace_unless_it_has_a_selector(server: FakeServer, run: Run) -> None:
    run("ps")
    run("ps", "--helpers", "--gpu", "1-2")
    run("ps", "--pid", "7", "--children")
    assert [request.selector for request in server.profiler.requests] == [
        pb.Selector(),
        pb.Selector(helpers=True, gpus=[1, 2]),
        pb.Selector(pids=[7], children=True),
    ]
    assert all(request.trainers for request in server.profiler.requests)


@pytest.mark.parametrize(("option", "offered"), [("--user", ["plain,ada", "plain,bob"]), ("--job-id", ["plain,77"])])
def test_users_and_jobs_of_processes_complete(server: FakeServer, option: str, offered: list[str]) -> None:
    server.profiler.processes = [captures.process(), captures.process(pid=7), captures.process(pid=8)]
    server.profiler.processes[1].user, server.profiler.processes[1].job_id = "bob", "77"
    assert completed(f"kinetoctl trace {option} ", KINETO_ADDRESS=server.address) == offered


def test_captures_list_shows_what_was_captured_and_when(server: FakeServer, run: Run) -> None:
    server.profiler.pages = [pb.ListCapturesResponse(captures=[finished()])]
    lines = run("captures", "list", "--label", "team=vision").stdout.splitlines()
    assert lines[0].split() == ["ID", "STATUS", "AGE", "PID", "JOB", "SIZE", "WHERE", "LABELS", "COMMAND"]
    cells = lines[1].split(maxsplit=9)
    assert (cells[:2], cells[3:9]) == (["c0ffee", "DONE"], ["4242", "-", "300.0", "KiB", "local", "team=vision"])
    assert cells[9].startswith("python")
    assert re.fullmatch(r"\d+(s|min|h|d)", cells[2])
    assert dict(server.profiler.requests[0].labels) == {"team": "vision"}


def test_a_list_has_the_top_cause_of_each_capture_and_its_page_the_verdict(server: FakeServer, run: Run) -> None:
    known, other = finished(), finished()
    known.answer.cause = "37 % of a step is building batches in Images.__getitem__ (train.py:13)" + " and more" * 9
    known.answer.verdict = "A step takes 51 ms on average. 37 % of it is building batches."
    server.profiler.pages = [pb.ListCapturesResponse(captures=[known, other])]
    lines = run("captures", "list").stdout.splitlines()
    place = lines[0].index("TOP CAUSE")
    shown = [line[place : lines[0].index("SIZE")].rstrip() for line in lines[1:]]
    assert shown[0].startswith("37 % of a step is building") and len(shown[0]) == 72
    assert shown[1] == "-"
    server.profiler.stored = known
    assert run("captures", "show", known.id).stdout.splitlines()[0] == known.answer.verdict


def test_captures_are_listed_with_absolute_times_where_there_is_room(server: FakeServer, run: Run) -> None:
    capture = finished()
    capture.created_ns = 1_782_000_000 * 10**9
    server.profiler.pages = [pb.ListCapturesResponse(captures=[capture]) for _ in range(2)]
    head, row = run("captures", "list", "-o", "wide").stdout.splitlines()
    assert "CREATED UTC" in head and "2026-06-21T00:00:00Z" in row
    (document,) = run("captures", "list", "-o", "json").json()
    assert document["created_utc"] == "2026-06-21T00:00:00Z"
    assert document["created_local"].startswith("2026-06-2")
    assert document["created_ns"] == capture.created_ns
    capture.ended_ns = 0
    server.profiler.pages = [pb.ListCapturesResponse(captures=[capture])]
    assert run("captures", "list", "-o", "json").json()[0]["ended_utc"] is None


def test_captures_and_processes_are_sorted_as_asked(server: FakeServer, run: Run) -> None:
    small, large = finished(), finished()
    small.id, large.id = "small", "large"
    large.targets[0].files[0].size_bytes *= 2
    for arguments, ids in (([], "small large"), (["--sort", "size"], "large small"), (["--reverse"], "large small")):
        server.profiler.pages = [pb.ListCapturesResponse(captures=[small, large])]
        _, *rows = run("captures", "list", *arguments).stdout.splitlines()
        assert " ".join(row.split()[0] for row in rows) == ids
    server.profiler.processes = [captures.process(pid=pid, rank=rank) for pid, rank in ((5, 1), (6, None), (7, 0))]
    _, *rows = run("ps", "--sort", "rank").stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["7", "5", "6"]
    assert run("ps", "--interval", "1ms").code == 2


def test_a_capture_is_watched_until_it_has_ended_and_then_shown(server: FakeServer, run: Run) -> None:
    server.profiler.stored = captures.capture(captures.target(state=pb.TARGET_STATE_COLLECT))
    server.profiler.watches = [[pb.CaptureEvent(snapshot=finished())]]
    result = run("captures", "show", "c0ffee", "--watch")
    assert result.code == 0
    assert [line.rpartition(": ")[2] for line in result.stderr.splitlines()] == ["COLLECT", "DONE"]
    assert result.stdout.startswith("capture c0ffee")


def test_captures_show_in_yaml_is_the_capture(server: FakeServer, run: Run) -> None:
    server.profiler.stored = finished()
    document = yaml.safe_load(run("captures", "show", "c0ffee", "-o", "yaml").stdout)
    assert document["targets"][0]["verdict"] == "VERDICT_DONE"
    assert document["targets"][0]["files"][0]["path"] is None


def test_captures_fetch_writes_the_verified_file(server: FakeServer, run: Run, tmp_path: Path) -> None:
    server.profiler.stored = finished()
    result = run("captures", "fetch", "c0ffee", "--output-dir", str(tmp_path / "new"))
    assert result.code == 0
    assert (tmp_path / "new" / "kineto-gpu-7-4242-c0ffee.json.gz").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pid", "7"], "capture c0ffee has no process with pid 7"),
        (["--format", "chrome-json"], "capture c0ffee has no file in format chrome-json, only chrome"),
    ],
)
def test_captures_fetch_of_what_is_not_there_is_code_3(
    server: FakeServer, run: Run, arguments: list[str], message: str
) -> None:
    server.profiler.stored = finished()
    result = run("captures", "fetch", "c0ffee", *arguments)
    assert result.code == 3
    assert message in result.stderr


def test_captures_fetch_of_a_running_capture_is_refused(server: FakeServer, run: Run) -> None:
    server.profiler.stored = captures.capture()
    result = run("captures", "fetch", "c0ffee")
    assert result.code == 5
    assert "capture c0ffee is still running" in result.stderr


def test_captures_cancel_names_each_capture(server: FakeServer, run: Run) -> None:
    server.profiler.cancelled = captures.capture(status=pb.CAPTURE_STATUS_CANCELLED)
    assert run("captures", "cancel", "c0ffee", "--keep-partial").stdout == "c0ffee CANCELLED\n"
    assert server.profiler.requests[0].keep_partial


def test_captures_delete_takes_several(server: FakeServer, run: Run) -> None:
    assert run("captures", "delete", "a", "b").stdout == "a deleted\nb deleted\n"
    assert run("captures", "delete", "a", "-o", "json").json() == {"deleted": ["a"]}


def test_host_shows_gpus_and_limits(server: FakeServer, run: Run) -> None:
    server.profiler.host = pb.Host(
        hostname="gpu-7",
        version="0.1.0",
        started_ns=0,
        now_ns=90_000_000_000,
        gpus=[pb.Gpu(index=0, uuid="GPU-1", name="H200", memory_bytes=141 << 30)],
        driver_version="570.1",
        max_duration_ns=600_000_000_000,
    )
    stdout = run("host").stdout
    assert "kinetod            0.1.0, up 1 min 30 s\n" in stdout
    assert "GPU 0              H200, 141.0 GiB, GPU-1\n" in stdout
    assert "longest trace      10 min\n" in stdout


def test_host_without_a_gpu_says_why(server: FakeServer, run: Run) -> None:
    server.profiler.host = pb.Host(gpu_note="no NVIDIA driver")
    assert "GPUs               none (no NVIDIA driver)\n" in run("host").stdout


def test_version_shows_both_sides(server: FakeServer, run: Run) -> None:
    server.profiler.host = pb.Host(version="9.9.9")
    own = metadata.version("kinetod")
    assert run("version", "-o", "json").json() == {"kinetoctl": own, "kinetod": "9.9.9"}


def test_version_without_a_daemon_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_here(capsys, f"unix:{tmp_path}/none.sock", "version")
    assert result.code == 0
    assert result.stdout.endswith("kinetod unreachable\n")
    assert run_here(capsys, f"unix:{tmp_path}/none.sock", "version", "--client").stderr == ""


def test_version_in_a_source_tree_says_that_it_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinetoctl.commands.version.DISTRIBUTION", "nothing-is-installed-by-this-name")
    assert run("version", "--client").stdout == "kinetoctl unknown (running from a source tree)\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(run: Run, shell: str) -> None:
    result = run("completion", shell)
    assert result.code == 0
    assert "_KINETOCTL_COMPLETE" in result.stdout


def test_tab_offers_commands_and_pids(server: FakeServer) -> None:
    server.profiler.processes = [captures.process(4242), captures.process(17)]
    assert completed("kinetoctl trace --pid 4", KINETO_ADDRESS=server.address) == ["plain,4242"]


def test_tab_offers_nothing_without_a_daemon(tmp_path: Path) -> None:
    complete = environment(
        KINETO_ADDRESS=f"unix:{tmp_path}/none.sock",
        _KINETOCTL_COMPLETE="bash_complete",
        COMP_WORDS="kinetoctl captures show c",
        COMP_CWORD="3",
    )
    result = run_process([], complete)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_an_unreachable_daemon_is_code_7_with_address_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_here(capsys, f"unix:{tmp_path}/none.sock", "ps")
    assert result.code == 7
    assert result.stderr == (
        f"error: no daemon at unix:{tmp_path}/none.sock: there is no such socket\n"
        "Start a daemon with `kinetod` (for your own processes) or `sudo systemctl start kinetod` (for the host),\n"
        "or give its address with --address or KINETO_ADDRESS.\n"
    )


def test_the_address_comes_from_the_environment_and_the_option_wins(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETO_ADDRESS", "unix:/nowhere/at/all.sock")
    assert run_here(capsys, server.address, "ps").code == 0


def test_a_wrong_address_in_the_environment_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_process(["ps"], environment(KINETO_ADDRESS="gpu-7"))
    assert result.code == 2
    assert "KINETO_ADDRESS: expected unix:/path/to/socket or host:port, got 'gpu-7'" in result.stderr


def test_common_options_work_before_and_after_the_command(server: FakeServer, run: Run) -> None:
    assert run("--output", "json", "ps").json() == []
    assert run("ps", "--output", "json").json() == []
    assert run("-o", "yaml", "ps", "-o", "json").json() == []


def test_no_arguments_print_the_help_and_are_wrong_usage() -> None:
    result = run_process([], environment())
    assert result.code == 2
    assert "Exit codes:" in result.stderr
    assert run_process(["captures"], environment()).code == 2
    assert run_process(["--help"], environment()).code == 0


def test_a_reader_that_has_gone_is_code_141(server: FakeServer) -> None:
    server.profiler.processes = [captures.process(pid) for pid in range(1, 3000)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        kinetoctl("--address", server.address, "ps"),
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=scaled(60),
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_fault_of_the_daemon_is_code_1(server: FakeServer, run: Run) -> None:
    server.profiler.host = Abort(grpc.StatusCode.INTERNAL, "a bug", reason="INTERNAL")
    assert run("host").code == 1


def completed(words: str, **environ: str) -> list[str]:
    """What bash is told for the last of these words."""
    complete = environment(
        _KINETOCTL_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1), **environ
    )
    command = [sys.executable, "-c", PATIENT, str(scaled(20))]
    done = subprocess.run(command, env=complete, capture_output=True, text=True, timeout=scaled(60), check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("trace --activities kernel,gpu_mem", ["plain,kernel,gpu_memcpy", "plain,kernel,gpu_memset"]),
        ("trace --kineto-config PROFILE_START_T", ["plain,PROFILE_START_TIME="]),
        ("trace --kineto-config /etc/lib", ["file,/etc/lib"]),
        ("trace --with-stack s", ["plain,sample"]),
        ("report --view operators --set ", ["plain,group_by=", "plain,stacks="]),
        ("report --view operators --set group_by=name+", ["plain,group_by=name+shape"]),
        ("report --view operators --set group_by=name+ --set stacks=", [""]),
    ],
)
def test_values_complete(words: str, offered: list[str]) -> None:
    assert completed(f"kinetoctl {words}") == offered


def test_a_mistyped_command_is_answered_with_those_that_are_like_it(run: Run) -> None:
    for words, like in ((["trcae"], "Did you mean trace?"), (["captures", "lst"], "Did you mean list?")):
        result = run(*words)
        assert result.code == 2
        assert like in result.stderr


@pytest.mark.parametrize(
    ("words", "like"),
    [
        (["trace", "7", "--duraton", "5"], "No such option '--duraton'. (Did you mean one of: '--duration'"),
        (["trace", "7", "--format", "crome"], "'perfetto'. Did you mean chrome or chrome-json?"),
        (["ps", "-o", "yml"], "'yaml'. Did you mean yaml?"),
        (["ps", "--sort", "ranks"], "Did you mean rank?"),
    ],
)
def test_a_mistyped_option_or_value_is_answered_with_those_that_are_like_it(
    run: Run, words: list[str], like: str
) -> None:
    result = run(*words)
    assert result.code == 2
    assert like in result.stderr


def test_a_value_that_is_like_none_is_answered_with_all(run: Run) -> None:
    assert run("ps", "-o", "xxxxxxx").stderr.splitlines() == [
        "error: --output: 'xxxxxxx' is not one of 'table', 'wide', 'json', 'yaml'.",
        "See `kinetoctl ps --help`.",
    ]


def test_the_version_is_an_option_too(run: Run) -> None:
    assert run("--version").stdout == f"kinetoctl {metadata.version('kinetod')}\n"


def test_an_error_with_a_reason_code_names_the_command_that_explains_it(server: FakeServer, run: Run) -> None:
    server.profiler.host = Abort(grpc.StatusCode.FAILED_PRECONDITION, "a capture is running", "BUSY")
    result = run("host")
    assert result.stderr.splitlines() == [
        "error: a capture is running [BUSY]",
        "Run `kinetoctl explain BUSY` for advice.",
        "`kinetoctl doctor PID` checks a process; `kinetoctl doctor` checks the daemon's host.",
    ]
