"""The accelerator of examples/: a running program that was not prepared is traced with its plug-in, and survives bad
ones.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.losses import without_losses
from support.machine.descriptors import open_files
from support.machine.kernel import allowed_to_trace
from support.service.cli import Result, run_process, wait_for_agent
from support.service.daemon import REPOSITORY, Daemon, running_daemon, watch_to_end
from support.service.plugin_packages import EXAMPLE, beside_kinetod, install_example, replace_method, rewrite
from support.waiting import scaled, scaled_option, until

COMPILER = shutil.which("cc")
KERNELS = {"pebble_matmul": 4, "pebble_add": 3, "pebble_sum": 1}  # of a step
pytestmark = [
    pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)"),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pebble") / "libpebble.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(made), str(EXAMPLE / "device" / "pebble.c")]
    subprocess.run(command, check=True)
    return made


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


@contextmanager
def program(library: Path) -> Iterator["subprocess.Popen[str]"]:
    """The example's program, which must live to the end of the test."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHON"))}
    command = [sys.executable, str(EXAMPLE / "device" / "program.py"), str(library)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def daemon_with(site: Path, tmp_path: Path) -> Iterator[Daemon]:
    configuration = tmp_path / "config.toml"
    configuration.write_text('[plugins]\nsources = ["pebble"]\n')
    with running_daemon("--config", str(configuration), environ=beside_kinetod(site)) as daemon:
        yield daemon


def kinetoctl(daemon: Daemon, *arguments: str) -> Result:
    return run_process(arguments, daemon.client_environ())


def trace(daemon: Daemon, pid: int, folder: Path, *options: str) -> dict[str, Any]:
    arguments = ["--pid", str(pid), "--duration", scaled_option(0.5), "--output-dir", str(folder), "-o", "json"]
    result = kinetoctl(daemon, "trace", *arguments, *options)
    assert result.stdout, result.stderr
    target: dict[str, Any]
    (target,) = result.json()["targets"]
    return target


def plugins_check(daemon: Daemon, pid: int) -> tuple[str, str]:
    """Status and detail of what doctor says about plug-ins."""
    checks = kinetoctl(daemon, "doctor", str(pid), "-o", "json").json()["checks"]
    (check,) = (each for each in checks if each["name"] == "plugins")
    return check["status"], check["detail"]


def events(target: dict[str, Any], category: str) -> list[dict[str, Any]]:
    (file,) = target["files"]
    document = json.loads(gzip.decompress(Path(file["path"]).read_bytes()))
    return [event for event in document["traceEvents"] if event.get("cat") == category]


def steps(pid: int) -> int:
    """A figure that grows as long as the program works: its voluntary context switches."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("voluntary"))
    return int(line.split()[1])


def test_a_running_program_is_traced_with_the_plug_in(library: Path, site: Path, tmp_path: Path) -> None:
    install_example(site)
    with daemon_with(site, tmp_path) as daemon, program(library) as process:
        assert process.pid in [each["pid"] for each in kinetoctl(daemon, "ps", "-o", "json").json()]
        sample = kinetoctl(daemon, "top", "--once", "-o", "json").json()
        assert process.pid in [each["process"]["pid"] for each in sample["processes"]]
        shows = "would record kernel, pebble_runtime: the process shows the signs of its accelerator"
        assert plugins_check(daemon, process.pid) == ("CHECK_STATUS_OK", f"pebble 1.0: {shows}")
        target = trace(daemon, process.pid, tmp_path / "out")
        assert plugins_check(daemon, process.pid) == ("CHECK_STATUS_OK", "pebble 1.0: records kernel, pebble_runtime")
        assert (target["verdict"], target["reason"]) == ("VERDICT_DONE", "")
        kernels, calls = events(target, "kernel"), events(target, "pebble_runtime")
        counts = Counter(event["name"] for event in kernels)
        assert set(counts) == set(KERNELS)
        assert counts["pebble_matmul"] > KERNELS["pebble_matmul"]
        for name, number in KERNELS.items():  # the first and the last step may be cut
            assert abs(counts[name] - number * counts["pebble_sum"]) <= 2 * number
        assert {event["name"] for event in calls} == {"pebble_launch"}
        assert all(event["dur"] > 190 for event in kernels if event["name"] == "pebble_matmul")
        launched = {event["args"]["correlation"]: event for event in calls}
        pairs = [
            (launched[event["args"]["correlation"]], event)
            for event in kernels
            if event["args"]["correlation"] in launched
        ]
        assert len(kernels) - len(pairs) <= 2 * sum(KERNELS.values())  # likewise
        assert all(launch["ts"] <= kernel["ts"] for launch, kernel in pairs)
        assert int(target["summary"]["activities"]["pebble_runtime"]) == len(calls)
        assert "cuda_runtime" not in target["summary"]["activities"]
        (source,) = (count for count in target["counts"] if count["source"] == "pebble")
        assert source["dropped"] == "0" or source["dropped"] == 0
        (file,) = target["files"]
        report = kinetoctl(daemon, "report", file["path"], "--view", "kernels")
        assert report.code == 0, report.stderr
        assert all(name in report.stdout for name in KERNELS)


def test_adding_it_touches_one_folder_and_one_line_of_configuration(site: Path, tmp_path: Path) -> None:
    install_example(site)
    assert sorted(path.name for path in site.iterdir()) == ["kinetod_pebble", "kinetod_pebble-1.0.dist-info"]
    product = [path for part in ("agent", "cli", "daemon", "protos") for path in (REPOSITORY / part).rglob("*.py")]
    assert len(product) > 500
    assert [path for path in product if "pebble" in path.read_text(errors="replace")] == []
    with running_daemon(environ=beside_kinetod(site)) as daemon:
        assert "pebble" in kinetoctl(daemon, "host").stdout
        assert "installed, but not in plugins.sources: pebble" in kinetoctl(daemon, "host").stdout
    with daemon_with(site, tmp_path) as daemon:
        assert "pebble 1.0 (kernel, pebble_runtime)" in kinetoctl(daemon, "host").stdout


def hangs_at_start(source: Path) -> None:
    replace_method(source, "start", "time.sleep(3600)")


def hangs_at_stop(source: Path) -> None:
    replace_method(source, "stop", "time.sleep(3600)")


def crashes(source: Path) -> None:
    replace_method(source, "stop", "raise SystemExit(1)")


def is_broken(source: Path) -> None:
    rewrite(source, {"SOURCE = Pebble()": "import _thread; _thread.exit()"})


def lies(source: Path) -> None:
    rewrite(source, {"SourceOutcome(self.writer.counts(),": "SourceOutcome((1 << 60, 1 << 61, 0),"})


BAD: dict[str, tuple[Callable[[Path], None], str, str, bool]] = {
    "hangs at start": (hangs_at_start, "PLUGIN_TIMEOUT", "pebble: start(): did not return within 5 s", False),
    "hangs at stop": (hangs_at_stop, "PLUGIN_TIMEOUT", "pebble: stop(): did not return within 5 s", True),
    "crashes": (crashes, "PLUGIN_FAILED", "pebble: stop(): raised SystemExit: 1", True),
    "is broken": (is_broken, "PLUGIN_FAILED", "pebble: loading it: raised SystemExit", False),
    "lies": (lies, "PLUGIN_INVALID", "pebble: stop(): reported 1152921504606846976 records", True),
}


@pytest.mark.parametrize(
    "kind",
    [
        "hangs at stop",
        "crashes",
        "lies",
        pytest.param("hangs at start", marks=pytest.mark.slow),
        pytest.param("is broken", marks=pytest.mark.slow),
    ],
)
def test_a_bad_plug_in_is_named_and_the_program_goes_on(kind: str, library: Path, site: Path, tmp_path: Path) -> None:
    spoil, code, text, recorded = BAD[kind]
    spoil(install_example(site) / "source.py")
    with daemon_with(site, tmp_path) as daemon, program(library) as process:
        target = trace(daemon, process.pid, tmp_path / "out")
        assert (target["verdict"], target["reason_code"]) == ("VERDICT_PARTIAL", code), target["reason"]
        assert target["reason"].startswith(text)
        assert events(target, "python_function")  # the capture went on without it
        assert bool(events(target, "kernel")) == recorded
        before, files = steps(process.pid), set(open_files(process.pid).values())
        again = trace(daemon, process.pid, tmp_path / "again")
        assert again["reason_code"] == code
        until(lambda: set(open_files(process.pid).values()) <= files, "nothing more stays open")
        until(lambda: steps(process.pid) > before + 50, "the program goes on")


def test_a_refused_plug_in_is_told_once_and_only_where_its_types_may_be_missed(
    library: Path, site: Path, tmp_path: Path
) -> None:
    (install_example(site) / "source.py").chmod(0o666)
    refusal = "the plug-in pebble is not used: other users could change it"
    with daemon_with(site, tmp_path) as daemon, program(library) as process:
        target = trace(daemon, process.pid, tmp_path / "all")
        assert (target["verdict"], without_losses(target["warnings"])) == ("VERDICT_DONE", [])
        status, detail = plugins_check(daemon, process.pid)
        assert (status, detail.partition(":")[0]) == ("CHECK_STATUS_NOTE", "pebble is not used")
        target = trace(daemon, process.pid, tmp_path / "kernels", "--activities", "kernel,python_function")
        assert target["reason_code"] == "ACTIVITY_TYPE_UNAVAILABLE"
        assert (target["reason"].count(refusal), without_losses(target["warnings"])) == (1, [])


def test_an_agent_that_came_with_the_program_gets_the_plug_in_too(library: Path, site: Path, tmp_path: Path) -> None:
    install_example(site)
    with daemon_with(site, tmp_path) as daemon:
        command = [sys.executable, "-m", "kineto_agent", str(EXAMPLE / "device" / "program.py"), str(library)]
        environ = daemon.client_environ()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            wait_for_agent(daemon, process.pid)
            target = trace(daemon, process.pid, tmp_path / "out", "--activities", "kernel")
            assert (target["verdict"], target["attach"]) == ("VERDICT_DONE", None)
            assert {event["name"] for event in events(target, "kernel")} == set(KERNELS)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.slow
def test_captures_with_a_plug_in_leave_nothing_behind(library: Path, site: Path, tmp_path: Path) -> None:
    install_example(site)
    with daemon_with(site, tmp_path) as daemon, program(library) as process:

        def weight() -> tuple[int, set[str]]:
            return resident_kib(process.pid), set(open_files(process.pid).values())

        def capture() -> None:
            spec = pb.CaptureSpec(selector=pb.Selector(pids=[process.pid]), duration_ns=100_000_000)
            made = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(30))
            (target,) = watch_to_end(daemon.stub(), made.id).targets
            assert target.verdict == pb.VERDICT_DONE

        capture()
        until(lambda: not any("kineto-pebble" in file for file in weight()[1]), "the arena is closed")
        first = weight()
        for _ in range(10):
            capture()
        until(lambda: weight()[1] == first[1], "the same files are open")
        assert weight()[0] < first[0] + 4096


def resident_kib(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])
