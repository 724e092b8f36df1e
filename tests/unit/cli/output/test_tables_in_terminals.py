"""Tables in terminals of every width: nothing but the last column, which is a command line, gives way."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.formats.trace_export import export_trace
from kinetoctl.output.console import PROSE_WIDTH, _cells, table_lines
from support.service import captures
from support.service.cli import environment, kinetoctl
from support.service.fake_profiler import FakeServer
from support.service.stored import store
from support.trace_files.sampled_stacks import FORWARD, LOADER, MAIN, SITE, sampled_trace

WIDTHS = (60, 80, 120, 200)
H200 = Path(__file__).parents[3] / "data/h200"
COMMANDS = {"plain": ["python", "train.py", "--config", "x" * 4000], "wide": ["python", "訓練.py", "é" * 4000]}


def in_terminal(width: int, *arguments: str, code: int = 0) -> list[str]:
    """The lines that kinetoctl prints in a terminal of this width, without blanks at their ends."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    given = {name: value for name, value in environment(TERM="dumb").items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(kinetoctl(*arguments), stdout=inner, stderr=subprocess.PIPE, env=given) as process:
        os.close(inner)
        output = b""
        while True:
            try:
                chunk = os.read(outer, 65536)
            except OSError:  # the other end has been closed
                break
            if not chunk:
                break
            output += chunk
    os.close(outer)
    assert process.returncode == code, process.stderr
    return [line.rstrip() for line in output.decode().splitlines()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_ps_keeps_every_column_beside_a_command_of_4000_characters(
    server: FakeServer, width: int, command: str
) -> None:
    process = pb.Process(
        pid=4_194_304, user="a-long-user", rank=1023, gpus=[0, 1, 2, 3], framework="torch 2.11.0+cu130",
        command=COMMANDS[command], agent_state=pb.AGENT_STATE_READY, attached=True, iterations=1_234_567,
    )  # fmt: skip
    server.profiler.processes = [process, captures.process()]
    lines = in_terminal(width, "--address", server.address, "ps")
    assert max(map(_cells, lines)) <= width
    text = " ".join(lines).split()
    for cell in ("4194304", "a-long-user", "1023", "0,1,2,3", "attached", "1234567", "4242", "python"):
        assert cell in text, (cell, lines)
    assert any(line.endswith("…") for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_of_captures_keeps_every_column_too(server: FakeServer, width: int) -> None:
    target = captures.done_target()
    target.process.command[:] = COMMANDS["plain"]
    target.process.job_id = "831245"
    capture = captures.capture(target, status=pb.CAPTURE_STATUS_DONE)
    capture.id = "20261123-230325-599-5c81f3"
    server.profiler.pages = [pb.ListCapturesResponse(captures=[capture])]
    lines = in_terminal(width, "--address", server.address, "captures", "list")
    assert max(map(_cells, lines)) <= width
    text = " ".join(lines).split()
    for cell in (capture.id, "DONE", "4242", "831245", "local"):
        assert cell in text, (cell, lines)


def gpu_process() -> pb.Process:
    return pb.Process(
        pid=4_194_304, user="a-long-user", rank=1023, gpus=[7], command=COMMANDS["plain"], job_id="831245",
        agent_state=pb.AGENT_STATE_BUSY, busy_capture_id="20261123-230325-599-5c81f3", iterations=1_234_567,
    )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_top_keeps_pid_rank_gpu_and_iteration(server: FakeServer, width: int) -> None:
    busy = pb.ProcessSample(process=gpu_process(), cpu=12.5, memory_bytes=300 << 30)
    busy.gpus.add(gpu=7, vendor="nvidia", memory_bytes=139 << 30, utilization=0.99)
    gpu = pb.GpuSample(
        gpu=pb.Gpu(index=7, name="NVIDIA H200 NVL 141GB", memory_bytes=140 << 30), vendor="nvidia", works=True,
        utilization=0.99, memory_utilization=0.8, memory_used_bytes=139 << 30, power_watts=699, power_limit_watts=700,
        temperature_celsius=71, sm_clock_hertz=1.98e9,
    )  # fmt: skip
    server.profiler.host_samples = [pb.HostSample(hostname="n1", version="1", cpus=8, gpus=[gpu], processes=[busy])]
    lines = in_terminal(width, "--address", server.address, "top", "--once")
    assert max(map(_cells, lines)) <= width
    text = " ".join(lines).split()
    for cell in ("4194304", "1023", "7", "1234567", "99%", "PID", "RANK", "GPU", "ITER", "COMMAND"):
        assert cell in text, (cell, lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_capture_of_a_command_of_4000_characters_is_verified_and_explained_within_the_width(
    server: FakeServer, width: int
) -> None:
    server.profiler.stored = captures.capture(captures.done_target(), status=pb.CAPTURE_STATUS_DONE)
    server.profiler.checks = [
        pb.FileCheck(pid=4_194_304, format="chrome", name="x" * 200, size_bytes=1 << 40, problem="is gone " * 40)
    ]
    with_damage = in_terminal(width, "--address", server.address, "captures", "verify", "c1", code=5)
    assert "4194304" in " ".join(with_damage).split()
    for lines in (with_damage, in_terminal(width, "explain")):
        assert max(map(_cells, lines)) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_the_head_of_a_result_keeps_pid_rank_and_verdict_beside_a_command_of_4000_characters(
    server: FakeServer, width: int
) -> None:
    target = captures.done_target()
    target.process.command[:] = COMMANDS["plain"]
    target.process.framework = "torch 2.13.0+cpu"
    server.profiler.stored = captures.capture(target, status=pb.CAPTURE_STATUS_DONE)
    lines = in_terminal(width, "--address", server.address, "captures", "show", "c1")
    (head,) = (line for line in lines if line.startswith("pid "))
    assert _cells(head) <= width
    assert head.startswith(f"pid {target.pid}") and " · python t" in head and head.endswith(": DONE")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_verdict_of_a_capture_is_in_lines_of_whole_words(server: FakeServer, width: int) -> None:
    verdict = "The DataLoader builds the next batch in the training process. Set num_workers to 4. " * 3
    server.profiler.stored = captures.capture(captures.done_target(), status=pb.CAPTURE_STATUS_DONE)
    server.profiler.stored.answer.verdict = verdict
    lines = in_terminal(width, "--address", server.address, "captures", "show", "c1")
    told = lines[: next(place for place, line in enumerate(lines) if line.startswith("capture "))]
    assert max(map(len, told)) <= min(width, PROSE_WIDTH)
    assert " ".join(told).split() == verdict.split()


def test_columns_that_do_not_fit_go_below_the_first_ones_indented() -> None:
    columns, rows = ("PID", "USER", "COMMAND"), [("1234567", "somebody", "python train.py --epochs 3")]
    assert table_lines(columns, rows, 40) == [
        "PID      USER      COMMAND",
        "1234567  somebody  python train.py --ep…",
    ]
    assert table_lines(columns, rows, 30) == [
        "PID      USER",
        "    COMMAND",
        "1234567  somebody",
        "    python train.py --epochs 3",
    ]
    assert table_lines(columns, rows, 16) == [
        "PID",
        "    USER",
        "    COMMAND",
        "1234567",
        "    somebody",
        "    python trai…",
    ]


@pytest.mark.slow
def test_report_leaves_out_columns_that_do_not_fit_but_with_wide_it_has_all(tmp_path: Path) -> None:
    store(tmp_path / "rank0", rank=0)
    command = ("report", str(tmp_path / "rank0"), "--view", "kernels")
    text = " ".join(in_terminal(60, *command))
    left_out = text.partition("… more columns: ")[2].partition(" (-o wide")[0].split(", ")
    assert left_out[0]
    head, *rows = in_terminal(60, *command, "-o", "wide")
    assert not any("more columns" in row for row in rows)
    assert [column for column in left_out if column.upper() not in head] == []


def test_the_report_has_functions_and_lines_whole_in_80_columns(tmp_path: Path) -> None:
    own = (*MAIN, "/job/training/language_model_trainer.py(10): LanguageModelTrainer.tokenize_and_pad_the_next_batch")
    llama = (*MAIN, SITE + "transformers/models/llama/modeling_llama.py(318): LlamaDecoderLayer._update_causal_mask")
    trace = sampled_trace(([own] * 5 + [llama] * 3 + [FORWARD] * 2 + [(*MAIN, LOADER)]) * 4, steps=4)
    export_trace(trace, tmp_path / "trace.json.gz")
    lines = in_terminal(80, "report", str(tmp_path / "trace.json.gz"))
    assert [line for line in lines if _cells(line) > 80] == []
    bar = lines.index("") + 1  # below the verdict
    assert (set(lines[bar]), len(lines[bar]), lines[bar + 1]) == ({"█"}, 80, "█ 100 % host other")
    place = ["LanguageModelTrainer.tokenize_and_pad_the_next_batch", "(language_model_trainer.py:42)"]
    table = lines.index("SHARE %  WHAT                                                  CAUSE")
    assert lines[table + 1 : table + 3] == [f" 100.0%  {place[0]}  host_other", f"           {place[1]}"]
    where = lines.index(f"    where: {place[0]}")
    assert lines[where + 1] == f"           {place[1]}"
    samples = lines.index("Python (python_samples)")
    assert "transformers/models/llama/modeling_llama.py(318):" in lines[samples + 4]
    assert SITE not in "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("traces", ["ddp4", "ddp4/rank0.json.gz"])
def test_no_line_of_the_report_of_a_recorded_trace_is_wider_than_80_columns(traces: str) -> None:
    lines = in_terminal(80, "report", str(H200 / traces))
    assert lines[0].startswith("A step takes 19.9 ms on average")
    assert [line for line in lines if _cells(line) > 80] == []
