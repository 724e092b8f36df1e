"""A trace of a program that hangs says where it stands, as `kinetoctl stacks` does."""

from pathlib import Path

import pytest
from support.service.cli import run_process
from support.service.daemon import Daemon
from support.targets.hung_programs import hanging

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lock", "waits for a lock (held.acquire)"),
        ("child", "waits for a child process"),
        ("network", "waits in client.recv()"),
    ],
)
def test_its_report_begins_with_what_the_main_thread_waits_for(
    daemon: Daemon, kind: str, words: str, tmp_path: Path
) -> None:
    environ = daemon.client_environ()
    with hanging(kind) as pid:
        traced = run_process(["trace", str(pid), "--duration", "1s", "--output-dir", str(tmp_path)], environ)
    assert traced.code == 0, traced.stderr
    (file,) = tmp_path.glob("*.json.gz")
    first = run_process(["report", str(file)], environ).stdout.splitlines()[0]
    assert first.startswith(f"Nothing moved: the main thread {words} in {kind}.hangs (hanging.py:")
