"""`kinetoctl top` in a pseudo-terminal, against a scripted daemon."""

import os
import signal
import termios
from collections.abc import Iterator

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service import captures
from support.service.cli import environment, kinetoctl
from support.service.fake_profiler import WAIT_FOR_CANCEL, Abort, FakeProfiler, FakeServer, serve
from support.service.pseudo_terminal import ALTERNATE, CURSOR, PseudoTerminal, in_terminal

WIDTHS = (60, 80, 120, 200)
GIB = 1 << 30
COOKED = termios.ECHO | termios.ICANON


def host(time_s: int = 1, processes: int = 3, gpus: int = 2) -> pb.HostSample:
    """A host with ranks that have long command lines; rank 0 is being traced."""
    sample = pb.HostSample(
        time_ns=1_790_000_000 * 10**9 + time_s * 10**9, hostname="node1", version="1.0", cpus=8, agents=processes
    )
    for index in range(gpus):
        sample.gpus.add(
            gpu=pb.Gpu(index=index, name="NVIDIA H200 NVL 141GB", memory_bytes=140 * GIB), vendor="nvidia", works=True,
            utilization=0.5, memory_utilization=0.4, memory_used_bytes=105 * GIB, power_watts=512,
            power_limit_watts=700, temperature_celsius=61, sm_clock_hertz=1.98e9,
        )  # fmt: skip
    for rank in range(processes):
        process = captures.process(4_194_000 + rank, rank)
        process.command[:] = ["python", f"train_{'abc'[rank % 3]}.py", "--config", "x" * 4000]
        process.iterations, process.iteration_ns = 1_234_000 + 20 * time_s, 50_000_000
        sample.processes.add(process=process, cpu=1 + rank, memory_bytes=GIB).gpus.add(
            gpu=rank % 2, vendor="nvidia", memory_bytes=70 * GIB, utilization=0.9 - rank / 10
        )
    sample.processes[0].process.busy_capture_id = "20261123-230325-599-5c81f3"
    return sample


@pytest.fixture
def server() -> Iterator[FakeServer]:
    endless = [host(time_s) for time_s in range(0, 60, 2)]
    with serve(FakeProfiler(host_samples=[*endless, WAIT_FOR_CANCEL])) as running:
        yield running


@pytest.fixture
def top(server: FakeServer) -> Iterator[PseudoTerminal]:
    with in_terminal(kinetoctl("--address", server.address, "top"), environment()) as terminal:
        terminal.until_text("4194000")
        yield terminal


def row(lines: list[str], pid: int) -> str:
    (line,) = [line for line in lines if str(pid) in line.split()]
    return line


def pids(lines: list[str]) -> list[int]:
    return [int(word) for line in lines for word in line.split()[:2] if word.startswith("41940")]


@pytest.mark.parametrize("columns", WIDTHS)
def test_every_width_keeps_pid_rank_gpu_and_pace_and_never_draws_beyond_it(server: FakeServer, columns: int) -> None:
    with in_terminal(kinetoctl("--address", server.address, "top"), environment(), columns=columns) as terminal:
        lines = terminal.until_text("1235160")
        assert terminal.widest() <= columns
        for cell in ("PID", "RANK", "GPU", "ITER", "ITER/S", "TREND", "COMMAND", "TEMP", "MEMORY"):
            assert cell in " ".join(lines).split(), lines
        assert row(lines, 4194001).split()[:1] == ["4194001"]
        assert "█" in next(line for line in lines if "61 °C" in line)
        assert "20" in row(lines, 4194001).split()


def test_the_trend_of_the_pace_and_who_is_traced_are_shown(top: PseudoTerminal) -> None:
    lines = top.until_text("1235160")  # of the last sample
    assert "███████ →" in row(lines, 4194001)
    assert row(lines, 4194000).startswith("●  4194000")
    assert not row(lines, 4194001).startswith("●")


def test_columns_without_values_and_the_capture_give_way_to_the_command_and_the_folder_of_its_program(
    server: FakeServer,
) -> None:
    sample = host(processes=2, gpus=0)
    for each in sample.processes:
        del each.gpus[:], each.process.gpus[:]
        each.process.command[:] = ["/opt/venv/bin/python", "/home/ada/jobs/train_llama.py", "--epochs", "3"]
    server.profiler.host_samples = [sample, WAIT_FOR_CANCEL]
    with in_terminal(kinetoctl("--address", server.address, "top"), environment(), columns=120) as terminal:
        lines = terminal.until_text("4194000")
        assert row(lines, 4194000).endswith("python /home/ada/jobs/train_llama.py --epochs 3")
        assert not any("JOB" in line or "CAPTURE" in line for line in lines)


def test_keys_sort_and_reverse(top: PseudoTerminal) -> None:
    assert pids(top.lines()) == [4194000, 4194001, 4194002]  # by their share of the GPUs
    top.press("P")
    assert pids(top.until_text("sorted by cpu")) == [4194002, 4194001, 4194000]
    top.press("r")
    assert pids(top.until_text("sorted by cpu, reversed")) == [4194000, 4194001, 4194002]
    top.press("Nr")
    assert pids(top.until(lambda lines: "sorted by pid" in lines[-2], "another order")) == [4194000, 4194001, 4194002]
    top.press(">")
    top.until_text("sorted by rank")
    top.press("<")
    top.until_text("sorted by pid")


def test_a_filter_narrows_the_list_while_it_is_typed(top: PseudoTerminal) -> None:
    top.press("/TRAIN_b")
    assert pids(top.until_text("filter: TRAIN_b")) == [4194001]
    top.press("\r")
    top.until_text("1-1 of 1 processes, sorted by gpu  filter: TRAIN_b")
    top.press("\x1b")
    assert pids(top.until_text("of 3 processes")) == [4194000, 4194001, 4194002]


def test_a_page_of_help_opens_scrolls_and_closes(server: FakeServer) -> None:
    with in_terminal(kinetoctl("--address", server.address, "top"), environment(), rows=8) as terminal:
        terminal.until_text("processes, sorted")
        terminal.press("?")
        terminal.until_text("select a process")
        terminal.press("G")
        assert "quit; captures continue" in terminal.until_text("quit; captures continue")[-2]
        terminal.press("q")
        terminal.until_text("processes, sorted")


def test_doctor_answers_about_the_selected_process(server: FakeServer, top: PseudoTerminal) -> None:
    server.profiler.diagnosis = pb.Diagnosis(process=captures.process(4_194_001), method="ptrace")
    server.profiler.diagnosis.checks.add(name="owner", status=pb.CHECK_STATUS_OK, detail="it is yours")
    top.press("\x1b[Bd")
    top.until_text("process 4194001 can be traced (ptrace)")
    assert server.profiler.requests[-1] == pb.DiagnoseProcessRequest(pid=4_194_001)
    top.press("\x1b")
    top.until_text("processes, sorted")


def traced(pid: int, verdict: pb.Verdict, reason_code: str = "") -> list[pb.CaptureEvent]:
    """The script of a capture that ends so."""
    states = (pb.TARGET_STATE_COLLECT, pb.TARGET_STATE_ENDED)
    targets = [captures.target(pid, state=state) for state in states]
    targets[1].verdict, targets[1].reason_code, targets[1].reason = (
        verdict,
        reason_code,
        "so it was" * bool(reason_code),
    )
    if verdict == pb.VERDICT_DONE:
        targets[1].files.append(captures.trace_file())
    ended = pb.CAPTURE_STATUS_DONE if verdict == pb.VERDICT_DONE else pb.CAPTURE_STATUS_FAILED
    return [
        captures.snapshot(captures.capture(targets[0])),
        captures.snapshot(captures.capture(targets[1], status=ended)),
    ]


def test_a_trace_is_asked_for_followed_and_named_after_the_end(server: FakeServer, top: PseudoTerminal) -> None:
    server.profiler.created = captures.capture(captures.target(4_194_001))
    server.profiler.watches = [[*traced(4_194_001, pb.VERDICT_DONE)]]
    top.press("jt")
    top.until_text("trace pid 4194001 for 5 s?  python train_b.py --config xxx")
    top.press("y")
    top.until_text("capture c0ffee of pid 4194001: DONE; `kinetoctl captures fetch c0ffee` downloads it")
    (created,) = [each for each in server.profiler.requests if isinstance(each, pb.CreateCaptureRequest)]
    expected = pb.CaptureSpec(selector=pb.Selector(pids=[4_194_001]), duration_ns=5 * 10**9, options=pb.Options())
    assert created.spec == expected
    top.press("q")
    assert top.ended() == 0
    assert "capture c0ffee of pid 4194001: DONE; `kinetoctl captures fetch c0ffee` downloads it" in top.printed


def test_any_other_answer_than_y_starts_no_trace(server: FakeServer, top: PseudoTerminal) -> None:
    for answer in ("\r", "n", "q", "\x1b"):
        top.press("t")
        top.until_text("trace pid 4194000 for 5 s?")
        top.press(answer)
        top.until_text("not traced")
    assert not any(isinstance(each, pb.CreateCaptureRequest) for each in server.profiler.requests)


def test_explain_says_what_the_reason_code_of_the_last_trace_means(server: FakeServer, top: PseudoTerminal) -> None:
    top.press("e")
    top.until_text("no trace of pid 4194000 started here has a reason code; press d to check the process")
    server.profiler.created = captures.capture(captures.target(4_194_000))
    server.profiler.watches = [[*traced(4_194_000, pb.VERDICT_FAILED, "AGENT_SILENT")]]
    top.press("ty")
    top.until_text("capture c0ffee of pid 4194000: FAILED AGENT_SILENT; so it was")
    top.press("e")
    top.until_text("Where: verdicts from the daemon: FAILED")
    lines = top.until_text("What to do: check whether the process is stopped")
    assert "  Where: verdicts from the daemon: FAILED" in lines


def test_a_refused_trace_is_told_and_can_be_explained(server: FakeServer, top: PseudoTerminal) -> None:
    server.profiler.created = Abort(grpc.StatusCode.FAILED_PRECONDITION, "a capture is running in it", "BUSY")
    top.press("ty")
    top.until_text("trace of pid 4194000: a capture is running in it [BUSY]")
    top.press("e")
    top.until_text("Where: refused calls: FAILED_PRECONDITION")
    top.press("\x1b\x1b")
    top.until(lambda lines: "sorted" in lines[-2] and not any("[BUSY]" in line for line in lines), "Esc takes it away")


def test_a_capture_that_runs_on_after_the_view_is_named(server: FakeServer, top: PseudoTerminal) -> None:
    server.profiler.created = captures.capture(captures.target(4_194_000))
    server.profiler.watches = [[captures.snapshot(server.profiler.created), WAIT_FOR_CANCEL]]
    top.press("ty")
    top.until_text("capture c0ffee of pid 4194000: PENDING")
    top.press("q")
    assert top.ended() == 0
    assert "capture c0ffee of pid 4194000 continues; `kinetoctl captures fetch c0ffee` downloads it" in top.printed


def test_a_new_size_is_used_at_once(top: PseudoTerminal) -> None:
    top.resize(60, 12)
    lines = top.until(lambda lines: "q quit" in lines[-1] and top.widest() <= 60, "all lines are of the new size")
    assert any("4194000" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_leaves_and_the_terminal_is_as_before(top: PseudoTerminal, number: signal.Signals) -> None:
    assert top.local_modes() & COOKED == 0
    assert top.local_modes() & termios.ISIG
    assert top.modes_on == {ALTERNATE}
    os.kill(top.process.pid, number)
    assert top.ended() == 0
    assert top.local_modes() & COOKED == COOKED
    assert top.modes_on == {CURSOR}
    assert "Traceback" not in top.printed


def test_ctrl_c_typed_leaves(top: PseudoTerminal) -> None:
    top.press("\x03")
    assert top.ended() == 0
    assert top.local_modes() & COOKED == COOKED


def test_an_error_of_the_daemon_restores_the_terminal_and_is_then_told(server: FakeServer) -> None:
    server.profiler.host_samples = [host(), Abort(grpc.StatusCode.PERMISSION_DENIED, "no longer", "NO_ROLE")]
    with in_terminal(kinetoctl("--address", server.address, "top"), environment()) as terminal:
        assert terminal.ended() == 6
        assert "error: no longer [NO_ROLE]" in terminal.printed.replace("\x1b[0m", "")
        assert terminal.local_modes() & COOKED == COOKED
        assert terminal.modes_on == {CURSOR}


def test_a_daemon_that_goes_away_is_waited_for_and_the_old_figures_are_told(server: FakeServer) -> None:
    server.profiler.host_samples = [host(0), Abort(grpc.StatusCode.UNAVAILABLE, "shutting down", "")]
    with in_terminal(kinetoctl("--address", server.address, "top"), environment()) as terminal:
        lines = terminal.until_text("no answer from")
        assert any("since" in line and "trying again" in line for line in lines)
        assert 4_194_000 in pids(lines)
        terminal.press("P")
        terminal.until_text("sorted by cpu")
        server.profiler.host_samples = [host(30), WAIT_FOR_CANCEL]
        terminal.until(
            lambda lines: "1234600" in " ".join(lines) and not any("no answer" in line for line in lines), "it is back"
        )
        terminal.press("q")
        assert terminal.ended() == 0


def test_a_daemon_that_never_answered_is_an_error(server: FakeServer) -> None:
    server.profiler.host_samples = [Abort(grpc.StatusCode.UNAVAILABLE, "not yet", "")]
    with in_terminal(kinetoctl("--address", server.address, "top"), environment()) as terminal:
        assert terminal.ended() == 7


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(server: FakeServer) -> None:
    command = [
        "bash",
        "-m",
        "-c",
        '"$@"; read -r; fg; read -r; fg',
        "bash",
        *kinetoctl("--address", server.address, "top"),
    ]
    with in_terminal(command, environment()) as terminal:
        terminal.until_text("4194000")
        for _ in range(2):
            terminal.press("\x1a")
            terminal.until_modes(CURSOR)
            terminal.until(lambda _lines: terminal.local_modes() & COOKED == COOKED, "the modes are restored")
            terminal.press("\n")
            terminal.until_modes(ALTERNATE)
        terminal.press("?")
        terminal.until_text("select a process")
        terminal.press("qq")
        assert terminal.ended() == 0
        assert terminal.modes_on == {CURSOR}


def test_after_sigstop_the_modes_are_set_again(top: PseudoTerminal) -> None:
    os.kill(top.process.pid, signal.SIGSTOP)
    top.stopped()
    top.cook()
    top.go_on()
    top.press("?")
    top.until_text("select a process")
    assert top.local_modes() & COOKED == 0
    top.press("qq")
    assert top.ended() == 0
