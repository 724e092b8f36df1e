"""What a decoder that runs an attacker's code can do: nothing beyond its own folder.

Each attack first succeeds outside of a worker, so that it is known to be one.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from kinetod.captures.result.decode_pool import DecodeError, WorkerPool

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-P", str(SUPPORT / "support/service/hostile_decoder.py"))
TRY = """
import os, pathlib
try:
{code}
except OSError as exc:
    said = type(exc).__name__
"""


def attempt(code: str) -> str:
    return TRY.format(code=textwrap.indent(code, "    "))


def outside(code: str, own: Path) -> Any:
    names: dict[str, Any] = {"own": own, "said": None}
    exec(attempt(code), names)
    return names["said"]


def taken_over(own: Path, *codes: str) -> list[Any]:
    """What the attacks say, one job after the other, the first in `own`; the errors of jobs that gave no answer."""

    async def jobs() -> list[Any]:
        pool = WorkerPool(1, command=COMMAND)
        await pool.start()
        try:
            said: list[Any] = []
            for number, code in enumerate(codes):
                folder = own.with_name(f"{own.name}{number or ''}")
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    answer = await pool.convert(folder, [code], deadline_ns=60 * 10**9)
                    said.append(answer["said"])
                except DecodeError as exc:
                    said.append(exc)
            return said
        finally:
            await pool.stop()

    return asyncio.run(jobs())


def denied(tmp_path: Path, code: str) -> None:
    assert outside(code, tmp_path / "own") == "done"
    (said,) = taken_over(tmp_path / "own", attempt(code))
    assert said == "PermissionError"


def test_it_has_no_credentials_of_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING", "https_proxy", "KINETOD_HOOKS_WEBHOOK")
    for name in names:
        monkeypatch.setenv(name, "secret of the daemon")
    code = "said = [name for name, value in os.environ.items() if value == 'secret of the daemon']"
    assert sorted(outside(code, tmp_path / "own")) == sorted(names)
    assert taken_over(tmp_path / "own", attempt(code)) == [[]]


def test_it_cannot_read_another_capture(tmp_path: Path) -> None:
    other = tmp_path / "other/trace.json.gz"
    other.parent.mkdir()
    other.write_bytes(b"secret")
    denied(tmp_path, f"said = 'done' if pathlib.Path({str(other)!r}).read_bytes() else ''")


def test_it_cannot_list_the_captures(tmp_path: Path) -> None:
    denied(tmp_path, f"said = 'done' if os.listdir({str(tmp_path)!r}) is not None else ''")


CHANGES = (
    "open({other!r}, 'ab').close()",
    "os.unlink({other!r})",
    "os.rename({other!r}, own / 'mine')",
    "os.chmod({folder!r}, 0o777)",
    "os.utime({other!r})",
    "os.truncate({other!r}, 0)",
    "os.link({other!r}, own / 'mine')",
    "os.symlink({other!r}, own / 'mine')",
    "os.mkfifo(own / 'mine')",
    "os.setxattr({other!r}, 'user.kineto', b'')",
)


def test_it_cannot_change_another_capture(tmp_path: Path) -> None:
    other = tmp_path / "other/trace.json.gz"
    other.parent.mkdir()
    other.touch()
    names = {"other": str(other), "folder": str(other.parent)}
    said = taken_over(tmp_path / "own", *(attempt(f"{code.format(**names)}; said = 'done'") for code in CHANGES))
    assert dict(zip(CHANGES, said, strict=True)) == dict.fromkeys(CHANGES, "PermissionError")
    assert other.exists()


def test_one_that_only_reads_cannot_change_its_own_folder(tmp_path: Path) -> None:
    file = tmp_path / "own/file"
    file.parent.mkdir()
    file.touch()
    codes = [f"said = os.path.getsize({str(file)!r})", f"said = 'done' if open({str(file)!r}).read() == '' else ''"]
    codes += [f"{code.format(other=str(file))}; said = 'done'" for code in CHANGES if "folder" not in code]

    async def asked() -> list[Any]:
        pool = WorkerPool(1, command=COMMAND)
        try:
            worker = await pool._take()
            job = {**pool._job(file.parent, 60 * 10**9), "reads_only": True}
            return [await worker.ask({**job, "formats": [attempt(code)]}) for code in codes]
        finally:
            await worker.stop(kill=True)

    said = [each["conversion"]["said"] for each in asyncio.run(asked())]
    assert said == [0, "done"] + ["PermissionError"] * (len(codes) - 2)


def test_it_cannot_connect_to_the_attach_helper(tmp_path: Path) -> None:
    path = tmp_path / "attach.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as helper:
        helper.bind(str(path))
        helper.listen()
        code = "import socket\nwith socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as it:\n"
        denied(tmp_path, f"{code}    it.connect({str(path)!r}); said = 'done'")


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_it_cannot_send_anything_over_the_network(tmp_path: Path, kind: str) -> None:
    with socket.socket(socket.AF_INET, getattr(socket, kind)) as receiver:
        receiver.bind(("127.0.0.1", 0))
        if kind == "SOCK_STREAM":
            receiver.listen()
        code = f"import socket\nwith socket.socket(socket.AF_INET, socket.{kind}) as it:\n"
        denied(tmp_path, f"{code}    it.connect(('127.0.0.1', {receiver.getsockname()[1]})); said = 'done'")


def test_it_has_no_descriptor_but_its_own_pipes(tmp_path: Path) -> None:
    code = """
import os, stat
said = []
for number in range(256):
    try: said.append((number, stat.S_IFMT(os.fstat(number).st_mode)))
    except OSError: pass
"""
    (said,) = taken_over(tmp_path / "own", code)
    assert [tuple(each) for each in said[:3]] == [(0, 0o020000), (1, 0o010000), (2, 0o010000)]
    assert [kind for _, kind in said[3:]] == [0o010000]  # where its answer goes


def test_it_cannot_signal_or_look_into_its_parents(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as victim:
        try:
            denied(tmp_path, f"os.kill({victim.pid}, 0); said = 'done'")
            denied(tmp_path, f"pathlib.Path('/proc/{victim.pid}/environ').read_bytes(); said = 'done'")
            denied(tmp_path, f"os.sched_setaffinity({victim.pid}, [0, 1]); said = 'done'")
            denied(tmp_path, f"os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19); said = 'done'")
            denied(tmp_path, f"import resource\nresource.prlimit({victim.pid}, resource.RLIMIT_NOFILE); said = 'done'")
        finally:
            victim.kill()


def test_it_cannot_start_a_program_or_a_process(tmp_path: Path) -> None:
    denied(tmp_path, "import subprocess\nsubprocess.run(['/bin/true']); said = 'done'")
    (said,) = taken_over(tmp_path / "own", attempt("os.fork() or os._exit(0); said = 'done'"))
    assert said == "PermissionError"


@pytest.mark.skipif(os.geteuid() != 0, reason="a daemon of root's")
def test_root_is_nobody_in_it(tmp_path: Path) -> None:
    code = """
import ctypes, struct
capabilities = ctypes.create_string_buffer(24)
said = [ctypes.CDLL(None).capget(struct.pack("=Ii", 0x20080522, 0), capabilities), capabilities.raw.hex()]
"""
    assert taken_over(tmp_path / "own", code, attempt("os.setuid(1)")) == [[-1, "00" * 24], "PermissionError"]


def test_it_cannot_undo_what_ends_it_with_its_daemon(tmp_path: Path) -> None:
    code = "import ctypes\nsaid = ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)"
    assert taken_over(tmp_path / "own", code) == [-1]


def test_it_cannot_forget_how_often_it_was_tried(tmp_path: Path) -> None:
    code = "os.unlink(own.with_name('own.tries')); said = 'done'"
    assert taken_over(tmp_path / "own", attempt(code)) == ["PermissionError"]


def test_it_can_do_its_work_with_threads(tmp_path: Path) -> None:
    code = """
import threading, pyarrow as pa, pyarrow.parquet as pq, numpy as np
(own / "columns").mkdir()
pq.write_table(pa.table({"x": np.arange(100_000)}), own / "columns/x.parquet")
found = []
thread = threading.Thread(target=lambda: found.append(pq.read_table(own / "columns/x.parquet", use_threads=True)))
thread.start(); thread.join()
(own / "columns/x.parquet").rename(own / "columns/y.parquet")
said = found[0].num_rows
"""
    assert taken_over(tmp_path / "own", code) == [100_000]


def test_what_it_leaves_in_its_process_is_gone_with_the_job(tmp_path: Path) -> None:
    code = "import kineto_trace.conversion.worker_job as it\nsaid = getattr(it, 'mark', None); it.mark = 1"
    assert taken_over(tmp_path / "own", code, code) == [None, None]


def test_it_cannot_answer_for_the_next_job(tmp_path: Path) -> None:
    forged = '{"id": 3, "ok": true, "conversion": {"said": "forged"}}'
    code = f"import os\nfor n in range(3, 256):\n    try: os.write(n, {forged!r}.encode() + b'\\n')\n"
    first, second = taken_over(tmp_path / "own", f"{code}    except OSError: pass", "said = 'true'")
    assert isinstance(first, DecodeError)
    assert second == "true"


def test_a_bomb_costs_its_own_target_only(tmp_path: Path) -> None:
    bomb, after = taken_over(tmp_path / "own", "said = len(bytearray(4 << 30))", "said = 'fine'")
    assert isinstance(bomb, DecodeError)
    assert bomb.code == "OUT_OF_MEMORY"
    assert after == "fine"


def test_one_that_crashes_leaves_no_core_and_its_signal_is_told(tmp_path: Path) -> None:
    (crash,) = taken_over(tmp_path / "own", f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    assert isinstance(crash, DecodeError)
    assert crash.reason.startswith("the decoder crashed (signal 11); gave up after 2 tries")


def test_it_ends_with_the_worker_that_it_was_forked_from(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    os.mkfifo(own / "pid")

    async def scenario() -> int:
        pool = WorkerPool(1, command=COMMAND)
        await pool.start()
        code = "import os, threading; open(own / 'pid', 'w').write(str(os.getpid())); threading.Event().wait()"
        job = asyncio.create_task(pool.convert(own, [code], deadline_ns=60 * 10**9))
        pid = int(await asyncio.to_thread((own / "pid").read_text))
        descriptor = os.pidfd_open(pid)
        job.cancel()
        await asyncio.wait([job])
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        await asyncio.wait_for(ended.wait(), 30)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        await pool.stop()
        return pid

    assert asyncio.run(scenario()) > 0
