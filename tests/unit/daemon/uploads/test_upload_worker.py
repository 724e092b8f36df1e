"""An upload worker that was taken over by the store that it talks to."""

import asyncio
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from kinetod.base.object_store_urls import folder_of
from kinetod.uploads.worker_client import UploadWorker
from kinetod.uploads.worker_protocol import UploadError, WorkerOptions
from support.waiting import scaled

TRY = """
import sys, os, pathlib, socket, signal
from kinetod.uploads.upload_worker import confine
state = pathlib.Path(sys.argv[1])
names = {{"TOKEN": str(state.parent / "token"), "KINETOD_X": str(state.parent / "key")}}
confine(state, (str(state.parent / "uploaded"),), names)
try:
{code}
    print("done")
except OSError as exc:
    print(type(exc).__name__)
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A daemon's folder, one to upload to, a token that its environment names, and a key that settings name."""
    for name in ("state/captures/c1", "uploaded"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("token", "key", "state/index.sqlite"):
        (tmp_path / name).write_text("secret")
    return tmp_path / "state"


def tried(state: Path, code: str) -> str:
    """What comes of the code in a confined process."""
    program = TRY.format(code=textwrap.indent(code, "    "))
    command = [sys.executable, "-c", program, str(state)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=scaled(60)).stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "(state / 'captures/c1/upload.json').write_text('{}')",
        "(state.parent / 'uploaded/x').write_text('x')",
        "(state.parent / 'token').read_text()",
        "socket.getaddrinfo('localhost', 80)",
        "a, b = socket.socketpair()",
        "os.kill(os.getpid(), 0)",
    ],
)
def test_it_can_do_what_uploads_take(state: Path, code: str) -> None:
    assert tried(state, code) == "done"


def test_it_reaches_stores(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        assert tried(state, f"socket.create_connection(('127.0.0.1', {store.getsockname()[1]})).close()") == "done"


@pytest.mark.parametrize(
    "code",
    [
        "(state / 'index.sqlite').read_text()",
        "(state / 'index.sqlite').unlink()",
        "(state.parent / 'key').read_text()",
        "(state.parent / 'token').write_text('x')",
        "os.listdir('/proc')",
        "pathlib.Path('/proc', str(os.getppid()), 'environ').read_bytes()",
        "os.kill(os.getppid(), 0)",
        "os.pidfd_open(os.getppid())",
        "socket.socket(socket.AF_UNIX)",
    ],
)
def test_it_can_do_nothing_else(state: Path, code: str) -> None:
    assert tried(state, code) == "PermissionError"


def test_programs_that_it_starts_are_confined_too(state: Path) -> None:
    code = f"import subprocess\nout = subprocess.run(['cat', {str(state / 'index.sqlite')!r}], capture_output=True)"
    assert tried(state, f"{code}\nif out.stdout: raise SystemExit('read')") == "done"


def test_the_worker_confines_itself_before_it_hears_anything(state: Path) -> None:
    async def asked(url: Path) -> None:
        worker = UploadWorker(state / "upload.lock", WorkerOptions)
        try:
            job = {"do": "read", "url": f"file://{url}/host/c1", "manifest_sha256": "", "name": "n", "block": 0}
            with pytest.raises(UploadError):
                await worker.ask(job)
            (pid,) = worker.pids()
            status = Path(f"/proc/{pid}/status").read_text()
            assert "NoNewPrivs:\t1" in status
            assert "Seccomp:\t2" in status
        finally:
            await worker.stop()

    asyncio.run(asked(state.parent / "uploaded"))


def test_a_folder_to_upload_to_is_the_prefix_of_the_capture_s() -> None:
    assert folder_of("file:///mnt/traces/gpu-7/c1") == "/mnt/traces"
    assert folder_of("s3://b/p/gpu-7/c1") == ""
