"""Texts of others (processes, captures, servers, traces) can neither steer a terminal nor add a line to a table."""

import ast
import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import kinetoctl
import pytest
import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.visible_text import in_json, one_line, visible
from kinetoctl.options import completers
from kinetoctl.options.completers import pids, users
from kinetoctl.output.capture_progress import LiveTable, show_progress
from kinetoctl.output.console import rich_console, say, stderr_console
from rich.live import Live
from support.service.cli import run_here
from support.service.fake_profiler import Abort, FakeProfiler, FakeServer, serve
from support.waiting import scaled

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\b\r\nFAKE line\u202e\u2066\u2028end"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\x7f\x08\x0d"


def evil(kind: type[Message], depth: int = 0, **known: Any) -> Any:
    """A message all of whose texts are hostile."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        inner: Any = field.message_type
        if field.name in known or depth > 4:
            continue
        if inner is not None and inner.GetOptions().map_entry:
            if inner.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
                getattr(message, field.name)[EVIL] = EVIL
        elif field.type == FieldDescriptor.TYPE_STRING or inner is not None:
            _fill(message, field, EVIL if inner is None else evil(inner._concrete_class, depth + 1))
    for name, value in known.items():
        setattr(message, name, value)
    return message


def _fill(message: Message, field: Any, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    capture = evil(pb.Capture, status=pb.CAPTURE_STATUS_DONE)
    capture.targets[0].state = pb.TARGET_STATE_ENDED
    stacks = evil(pb.ProcessStacks)
    stacks.threads[0].main = True
    profiler = FakeProfiler(
        processes=[evil(pb.Process, pid=7)],
        stored=capture,
        cancelled=capture,
        pages=[pb.ListCapturesResponse(captures=[capture])],
        host=evil(pb.Host),
        diagnosis=evil(pb.Diagnosis),
        host_diagnosis=evil(pb.HostDiagnosis),
        host_samples=[evil(pb.HostSample)],
        counters=evil(pb.ListCountersResponse),
        counter_means=[evil(pb.CounterMeans)],
        checks=[evil(pb.FileCheck)],
        stacks=[[stacks]],
    )
    with serve(profiler) as running:
        yield running


COMMANDS = [
    ("ps", "--all"),
    ("captures", "list"),
    ("captures", "show", "20260101-000000-000-000000"),
    ("captures", "cancel", "20260101-000000-000-000000"),
    ("captures", "verify", "20260101-000000-000-000000"),
    ("host",),
    ("doctor",),
    ("doctor", "7"),
    ("top", "--once"),
    ("stacks", "7"),
    ("stacks", "7", "-o", "wide"),
    ("counters", "list"),
    ("counters", "list", "--metrics"),
    ("counters", "sets"),
    ("counters", "watch", "--once"),
    ("version",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("form", ["table", "json", "yaml", "terminal"])
def test_no_command_lets_a_control_through(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...],
    form: str,
) -> None:  # fmt: skip
    if form == "terminal":
        monkeypatch.setattr(type(sys.stdout), "isatty", lambda _self: True, raising=False)
        monkeypatch.setenv("COLUMNS", "100000")
        monkeypatch.setenv("TERM", "xterm")
    result = run_here(capsys, server.address, *command, *(("-o", form) if form in ("json", "yaml") else ()))
    printed = result.stdout + result.stderr
    own_styles = re.sub(r"\x1b\[[0-9;]*m", "", printed) if form == "terminal" else printed
    assert printed and not CONTROL.search(own_styles)
    if form in ("table", "terminal"):
        assert r"\x1b]0;title" in printed
        assert not any(line.startswith("FAKE") for line in printed.splitlines())
    else:
        value = json.loads(result.stdout) if form == "json" else yaml.safe_load(result.stdout)
        assert EVIL in json.dumps(value, ensure_ascii=False).encode().decode("unicode_escape") or EVIL in texts(value)


def texts(value: Any) -> list[str]:
    """All texts in a JSON value: what programs get is exact."""
    if isinstance(value, str):
        return [value]
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in texts(item)]


def test_an_error_of_a_server_is_shown_without_its_controls(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.profiler.processes = Abort(grpc.StatusCode.FAILED_PRECONDITION, EVIL, reason="NO_AGENT")
    result = run_here(capsys, server.address, "ps")
    assert result.code == 5
    assert r"\x1b]0;title" in result.stderr and not CONTROL.search(result.stderr)


def test_progress_of_a_trace_is_shown_without_controls(capsys: pytest.CaptureFixture[str]) -> None:
    capture = evil(pb.Capture)
    capture.targets[0].state = pb.TARGET_STATE_ENDED
    with show_progress(quiet=False, color=True) as lines:
        lines.note(EVIL)
        lines.update(capture)
    console = stderr_console(color=False)
    with Live(console=console, auto_refresh=False) as live:
        table = LiveTable(live)
        table.note(EVIL)
        table.update(capture)
        console.print(table)
    printed = capsys.readouterr().err
    assert printed.count(r"\x1b]0;title") >= 4 and not CONTROL.search(printed)


def test_a_shell_is_offered_only_what_can_be_typed(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_ADDRESS", server.address)
    monkeypatch.setattr(completers, "COMPLETION_TIMEOUT_S", scaled(20))
    assert users("") == []
    (item,) = pids("")
    assert item.value == "7" and not CONTROL.search(item.help or "") and "\n" not in (item.help or "")


def test_lines_and_consoles_spell_controls_out(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL, label="\x1b[31mmine\x1b[0m ")
    rich_console(sys.stdout, width=200, color_system=None).print(EVIL, markup=False)
    printed = capsys.readouterr().out.replace("\x1b[31mmine\x1b[0m", "")
    assert printed.count(r"\x9b31m\x7f") == 2 and not CONTROL.search(printed)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é 名 \N{ROCKET}\t\n", None), ("\x1b[0m", r"\x1b[0m"), ("\u202eabc", r"\u202eabc"), ("\ud800", r"\ud800"),
     ("\x85", r"\x85")],
)  # fmt: skip
def test_what_is_no_control_stays(text: str, shown: str | None) -> None:
    assert visible(text) == (text if shown is None else shown)
    assert one_line("a\tb\nc") == r"a\x09b\x0ac"


def test_json_has_the_same_value() -> None:
    value = {EVIL: [EVIL, "\x85\u2029"]}
    text = in_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value and not CONTROL.search(text)


def test_a_hostile_trace_is_shown_without_its_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "job\x1b[2J"
    folder.mkdir()
    event = {"ph": "X", "cat": "kernel", "name": EVIL, "pid": 0, "tid": 7, "ts": 1, "dur": 5, "args": {"stream": 7}}
    path = folder / "trace\x1b]0;x\x07.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event, {**event, "name": '=cmd|"/C calc"!A0'}]}))
    for arguments in (
        ("report", str(path)),
        ("report", "--view", "kernels", str(path)),
        ("report", "--view", "kernels", "-o", "csv", str(path)),
        ("report", "--view", "kernels", "-o", "json", str(path)),
        ("query", "SELECT * FROM kernel", str(path)),
        ("query", "-o", "csv", "SELECT name, -5 AS number, '-5' AS text FROM kernel", str(path)),
        ("query", "SELECT nothing FROM kernel", str(path)),
        ("export", str(path), "--to", "perfetto", "--output", str(tmp_path / "out\x1b[2J.pftrace")),
        ("report", str(folder / "none\x1b[2J.json")),
    ):
        result = run_here(capsys, "unix:/nowhere", *arguments)
        assert not CONTROL.search(result.stdout + result.stderr), arguments
        assert (result.stdout + result.stderr).strip(), arguments


def test_a_formula_in_a_trace_is_none_in_csv_and_numbers_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "=HYPERLINK(1)", "pid": 0, "tid": 7, "ts": 1, "dur": 5}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    result = run_here(
        capsys, "unix:/nowhere", "query", "-o", "csv", "SELECT name, -5 AS number, '-5' AS text FROM kernel", str(path)
    )
    assert list(csv.reader(io.StringIO(result.stdout)))[1] == ["'=HYPERLINK(1)", "-5", "-5"]


def test_everything_is_printed_in_one_place() -> None:
    root = Path(kinetoctl.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        if path == root / "output/console.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "click.echo", "click.secho", "print", "Console", "rich.print", "sys.stdout.write", "sys.stderr.write",
            }:  # fmt: skip
                found.append(f"{path.relative_to(root)}: {ast.unparse(node)}")
    assert found == ["demo_target.py: print('ready', flush=True)"]
