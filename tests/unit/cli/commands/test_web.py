"""The command that starts the page."""

import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from kinetoctl.commands.web import EDITORS, _files, parse_editor
from kinetoctl.errors import NoSuchTrace
from support.service.cli import environment, kinetoctl, run_here
from support.trace_files import synthetic
from support.waiting import scaled


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(synthetic.text(2_000))
    return path


def test_a_file_that_does_not_exist_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_here(capsys, "unix:/nowhere", "web", "--no-browser", "/no/such/trace.json")
    assert (found.code, found.stdout) == (3, "")
    assert "there is no file /no/such/trace.json" in found.stderr


def test_what_may_come_later_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    arguments = [f"{tmp_path}/empty", f"{tmp_path}/empty/*.json", f"{tmp_path}/*/rank*.json", "s3://bucket/job"]
    assert _files([*arguments, *arguments]) == arguments


@pytest.mark.parametrize("text", ["/no/such/folder/*.json", "/no/such/folder/"])
def test_what_cannot_come_is_refused(text: str) -> None:
    with pytest.raises(NoSuchTrace, match="there is no file /no/such/folder/"):
        _files([text])


def test_a_port_that_is_in_use_is_said(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = run_here(capsys, "unix:/nowhere", "web", "--no-browser", "--port", str(port), str(trace))
    assert found.code == 5
    assert f"port {port} on 127.0.0.1 cannot be used" in found.stderr


def test_it_prints_its_address_serves_and_ends_with_ctrl_c(trace: Path) -> None:
    command = kinetoctl("web", "--no-browser", str(trace))
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/enter#[\w-]{43}", address)
        assert match
        assert "press Ctrl-C to stop" in process.stderr.readline()
        with socket.create_connection(("127.0.0.1", int(match[1]))) as sock:
            sock.sendall(f"GET /enter HTTP/1.0\r\nHost: 127.0.0.1:{match[1]}\r\n\r\n".encode())
            assert b"200 OK" in sock.recv(65_536)
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(30)) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("name", EDITORS)
def test_an_editor_is_known_by_its_name(name: str) -> None:
    assert parse_editor(name) == EDITORS[name]


@pytest.mark.parametrize(
    "text", ["vscode://vscode-remote/ssh-remote+node7{path}:{line}", "http://localhost:63342/api/file/{path}:{line}"]
)
def test_a_template_has_a_path_and_a_line(text: str) -> None:
    assert parse_editor(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "emacs",
        "vscode://file{path}",
        "vscode://file:{line}",
        "javascript:alert('{path}{line}')",
        "data:text/html,{path}{line}",
        "{path}:{line}",
        "//host/{path}:{line}",
        "vscode://file{path} {line}",
        "JavaScript:{path}{line}",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected vscode, cursor, pycharm, or a URL"):
        parse_editor(text)
