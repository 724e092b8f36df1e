"""Every command, and a daemon, in a folder that belongs to somebody else: nothing of it is imported, read or run."""

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_trace.store.parquet_folder import save_columns
from kinetoctl import app
from kinetoctl.web.analyses.analysis_queue import WorkerLimits, WorkerProcess
from kinetoctl.web.shared.serving import WarmProcess
from support.service.daemon import Daemon
from support.trace_files.traces import target, trace
from support.waiting import scaled

# What interpreters, our packages and their libraries import or look for where they are.
PACKAGES = (
    *("kinetoctl", "kinetod", "kineto_trace", "kineto_protos", "kineto_agent", "numpy", "pyarrow", "duckdb", "click"),
    *("rich", "grpc", "google", "msgspec", "yaml", "fsspec", "psutil", "torch", "sitecustomize", "usercustomize"),
)
SETTINGS = (
    *(".duckdbrc", ".duckdb", "duckdb.ini", ".kineto", ".kineto.toml", "kinetod.toml", "libkineto.conf", ".env"),
    *("pyvenv.cfg", "python.pth", "pyproject.toml", "setup.cfg", ".netrc", ".pdbrc", "matplotlibrc", "fsspec.json"),
)
RANKS = ("rank0.kineto", "rank1.kineto")
HOSTILE = "import os\nos.close(os.open({seen!r}, os.O_CREAT | os.O_WRONLY))\nos._exit(99)\n"
CONSOLE_SCRIPT = "import sys\nfrom kinetoctl.__main__ import main\nsys.exit(main())\n"  # as pip writes it
SMALL_POOL = (
    "from kineto_trace.catalog import view_runner\nview_runner.SMALL_JOB_BYTES = 0\nview_runner._cores = lambda: 2\n"
)
TARGET = "import sys, time\nprint(flush=True)\nwhile True: time.sleep(0.01)\n"
COMMANDS = (
    "version", "explain", "completion bash", "plugin list", "plugin new hostile1 --output-dir {out}",
    "plugin check {out}", "migrate dynolog --flags {flags}", "query --schema", "ps --all", "top --once", "host",
    "counters list", "captures list", "doctor {pid}", "stacks {pid}", "trace {pid} --duration 200ms --output-dir {out}",
    "memory {pid} --duration 100ms", "run -- {python} -c pass", "demo --duration 200ms --output-dir {out}",
    "report {ranks}", "report --workers 2 {ranks}", "report --html {out}/report.html {ranks}",
    "query --output json SELECT(1) {ranks}", "diff {ranks}", "export --merge -o {out}/both.json.gz {ranks}",
    "open --no-browser --port 0 rank0.kineto", "web --no-browser .",
)  # fmt: skip
UNTIL_CTRL_C = ("open", "web")
_IN_OPEN, _EVENT = 0x20, struct.Struct("iIII")


class Opened:
    """The names in a folder that anybody opens, by the kernel's word."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._watch = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._watch, os.fsencode(folder), _IN_OPEN) > 0, ctypes.get_errno()

    def names(self) -> set[str]:
        found, data = set(), b""
        with contextlib.suppress(BlockingIOError):
            while True:
                data += os.read(self._watch, 1 << 16)
        while data:
            length = _EVENT.unpack_from(data)[3]
            found.add(data[_EVENT.size :][:length].rstrip(b"\0").decode())
            data = data[_EVENT.size + length :]
        return found - {""}  # the folder itself

    def close(self) -> None:
        os.close(self._watch)


class HostileFolder:
    """The folder and what is beside it."""

    def __init__(self, root: Path) -> None:
        self.path, self.seen, self.out, self.bin = root / "theirs", root / "seen", root / "out", root / "bin"
        for folder in (self.path, self.out, self.bin):
            folder.mkdir()
        text = HOSTILE.format(seen=str(self.seen))
        for name in {*sys.stdlib_module_names, *PACKAGES}:
            (self.path / f"{name}.py").write_text(text)
        for name in ("numpy", "pyarrow", "kinetoctl", "multiprocessing", "encodings", "concurrent", "kineto_trace"):
            (self.path / name).mkdir()
            (self.path / name / "__init__.py").write_text(text)
        for name in SETTINGS:
            (self.path / name).write_text(text)
        for number, name in enumerate(RANKS):
            one = trace({"kernel": [{"name": "k", "duration": 5}]}, target=target(rank=number))
            save_columns(one, self.path / name)
        (root / "flags").write_text("--port=1778\n")
        self.script, self.small_pool = self.bin / "kinetoctl", self.bin / "small-pool"
        self.script.write_text(CONSOLE_SCRIPT)
        self.small_pool.write_text(SMALL_POOL + CONSOLE_SCRIPT)

    def words(self, command: str, pid: int) -> list[str]:
        known = {"out": self.out, "flags": self.out.parent / "flags", "pid": pid, "python": sys.executable}
        return command.format(**known, ranks=" ".join(RANKS)).split()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Nobody may import anything in it, or open what was not named."""
        opened = Opened(self.path)
        try:
            with contextlib.chdir(self.path):
                yield
            assert opened.names() <= set(RANKS)
            assert not self.seen.exists(), "a file of the folder was run"
        finally:
            opened.close()
            self.seen.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> HostileFolder:
    return HostileFolder(tmp_path_factory.mktemp("hostile"))


class _Daemon(Daemon):
    def command(self) -> list[str]:
        command = super().command()
        return [command[0], "-P", *command[1:]]  # as its console script: without the folder that it is started in


@pytest.fixture(scope="module")
def daemon(hostile: HostileFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    started = _Daemon(tmp_path_factory.mktemp("daemon"))
    with hostile.watched():
        started.start()
    yield started
    with hostile.watched():
        assert started.stop() == 0


@pytest.fixture(scope="module")
def pid(hostile: HostileFolder) -> Iterator[int]:
    """A program that may import from there, as its own programs do; the agent in it may not."""
    arguments = [sys.executable, "-c", TARGET]
    with subprocess.Popen(arguments, cwd=hostile.path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
        process.kill()


def test_what_is_there_would_be_run(hostile: HostileFolder) -> None:
    done = subprocess.run([sys.executable, "-m", "kinetoctl"], cwd=hostile.path, check=False)
    assert done.returncode == 99
    assert hostile.seen.exists()
    hostile.seen.unlink()


def test_every_command_is_tried() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(app.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_nothing_from_the_folder_it_runs_in(
    hostile: HostileFolder, daemon: Daemon, pid: int, command: str
) -> None:
    script = hostile.small_pool if command.startswith("report {") else hostile.script
    words = [sys.executable, str(script), *hostile.words(command, pid)]
    with hostile.watched():
        process = subprocess.Popen(
            words,
            env=daemon.client_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with process:
            assert process.stdout is not None
            if words[2] in UNTIL_CTRL_C:
                line = process.stdout.readline()
                process.send_signal(signal.SIGINT)
            else:
                line = b""
            said = (line + process.communicate(timeout=scaled(120))[0]).decode()
    assert process.returncode in (0, 130) or words[2] in ("memory", "counters", "plugin", "doctor", "host"), said
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", [WorkerProcess, WarmProcess])
def test_a_worker_of_the_page_takes_nothing_from_the_folder_it_runs_in(
    hostile: HostileFolder, kind: type[WorkerProcess] | type[WarmProcess]
) -> None:
    worker = kind(WorkerLimits())
    with hostile.watched(), contextlib.closing(worker):
        worker.start()
        assert worker._process is not None and worker._process.poll() is None
