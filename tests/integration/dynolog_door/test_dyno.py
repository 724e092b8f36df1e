"""The unmodified `dyno`: what it prints, how it ends, and the scripts around it. `make dyno DYNOLOG=path` runs this."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.dynolog.door import noted_file
from support.service.daemon import Daemon
from support.waiting import scaled

DYNOLOG_VARIABLE = "DYNOLOG_SOURCES"
_PACKAGES = ("librust-anyhow-dev", "librust-clap-3-dev", "librust-serde-json-dev")
_FETCH_S, _BUILD_S = 300, 1200


class DynoMissing(Exception):
    """It cannot be built here; the text says why."""


def sources() -> Path:
    """The checkout of Dynolog. Raises DynoMissing."""
    named = os.environ.get(DYNOLOG_VARIABLE, "")
    if not named:
        raise DynoMissing(f"{DYNOLOG_VARIABLE} names no checkout of facebookincubator/dynolog (make dyno DYNOLOG=path)")
    if not (Path(named) / "cli" / "Cargo.toml").is_file():
        raise DynoMissing(f"{named} has no cli/Cargo.toml")
    return Path(named)


def built(folder: Path) -> Path:
    """The program, built below an empty folder. Raises DynoMissing."""
    found = sources()
    if shutil.which("cargo") is None:
        raise DynoMissing("there is no cargo")
    registry = _registry(folder)
    shutil.copytree(found / "cli", folder / "cli")
    settings = folder / "cli" / ".cargo" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(
        f'[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "{registry}"\n[build]\njobs = 1\n'
    )
    environ = {**os.environ, "CARGO_HOME": str(folder / "home"), "CARGO_TARGET_DIR": str(folder / "target")}
    _run(["cargo", "build", "--quiet", "--offline"], _BUILD_S, cwd=folder / "cli", environ=environ)
    return folder / "target" / "debug" / "dyno"


def _registry(folder: Path) -> Path:
    """Fetches and unpacks the packages. Raises DynoMissing."""
    packages, root = folder / "packages", folder / "root"
    packages.mkdir()
    listed = _run(["apt-get", "install", "--print-uris", "-qq", *_PACKAGES], _FETCH_S)
    files = [line.split()[1] for line in listed.splitlines() if line.startswith("'")]
    names = sorted({name.partition("_")[0].replace("%2b", "+") for name in files if name.startswith("librust-")})
    if not names:
        raise DynoMissing(f"apt knows no packages of {', '.join(_PACKAGES)}; run apt-get update")
    _run(["apt-get", "download", "-qq", *names], _FETCH_S, cwd=packages)
    for package in packages.glob("*.deb"):
        _run(["dpkg-deb", "--extract", str(package), str(root)], _FETCH_S)
    return root / "usr" / "share" / "cargo" / "registry"


def _run(command: list[str], timeout_s: int, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DynoMissing(f"{command[0]}: {exc}") from exc
    if done.returncode:
        raise DynoMissing(f"{command[0]} {command[1]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


pytestmark = [pytest.mark.slow, pytest.mark.torch]
Done = subprocess.CompletedProcess[str]
PANIC = 101


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return built(tmp_path_factory.mktemp("dyno"))
    except DynoMissing as exc:
        pytest.skip(str(exc))


@pytest.fixture
def dyno(program: Path, door: str) -> Callable[..., Done]:
    host, _, port = door.rpartition(":")

    def run(*arguments: str) -> Done:
        command = [str(program), "--hostname", host, "--port", port, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)

    return run


def response(done: Done) -> object:
    """The JSON that dyno prints."""
    line = next(line for line in done.stdout.splitlines() if line.startswith("response = "))
    return json.loads(line.removeprefix("response = "))


def test_short_commands_print_the_answer_and_succeed(dyno: Callable[..., Done]) -> None:
    done = dyno("status")
    assert (done.returncode, done.stdout) == (0, 'response length = 12\nresponse = {"status":1}\n')
    for command in (("version",), ("dcgm-pause",), ("dcgm-pause", "--duration-s", "5"), ("dcgm-resume",)):
        done = dyno(*command)
        assert done.returncode == 0, done.stderr
        assert response(done)


def test_a_trace_is_where_dyno_says_that_it_will_be(
    daemon: Daemon, dyno: Callable[..., Done], training: int, place: Path
) -> None:
    options = ("--record-shapes", "--with-stacks", "--with-flops", "--with-modules", "--fail-on-no-process")
    for name, extent in (("i", ("--iterations", "3")), ("d", ("--duration-ms", "200"))):
        file = str(place / f"{name}.json")
        done = dyno("gputrace", "--pids", str(training), "--log-file", file, *extent, *options)
        assert done.returncode == 0, done.stdout
        written = place / f"{name}_{training}.json"
        said = f"Matched 1 processes\nTrace output files will be written to:\n    {written}\n"
        assert done.stdout.endswith(said), done.stdout
        assert noted_file(daemon, written)["decision"] == "written"
        assert any(event.get("cat") == "cpu_op" for event in json.loads(written.read_bytes())["traceEvents"])


def test_nothing_that_matches_is_an_error_only_on_request(dyno: Callable[..., Done]) -> None:
    nobody = ("gputrace", "--pids", str(2**22 + 1), "--log-file", "/tmp/t.json")
    done = dyno(*nobody)
    assert done.returncode == 0
    assert "No processes were matched, please check --job-id or --pids flags" in done.stdout
    done = dyno(*nobody, "--fail-on-no-process")
    assert (done.returncode, done.stderr) == (1, "Error: No processes were matched\n")


def test_what_the_daemon_does_not_understand_ends_in_dynos_panic_as_with_dynolog(dyno: Callable[..., Done]) -> None:
    done = dyno("gputrace", "--log-file", '/tmp/a"b.json')
    assert done.returncode == PANIC
    assert "Unable to decode output bytes" in done.stderr


def test_a_wrong_value_is_a_refusal_that_dyno_can_print(dyno: Callable[..., Done]) -> None:
    done = dyno("gputrace", "--log-file", "/tmp/t.json", "--profile-start-time", "1000", "--fail-on-no-process")
    assert done.returncode == 1
    assert "in the past; use 0 to start at once" in done.stdout


def test_unitrace_traces_a_job_on_its_hosts(daemon: Daemon, program: Path, door: str, place: Path) -> None:
    """unitrace.py runs `dyno` from PATH with the default port, so a program of that name adds ours."""
    host, _, port = door.rpartition(":")
    wrapper = place / "bin" / "dyno"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec "{program}" --port {port} "$@"\n')
    wrapper.chmod(0o755)
    loop = Path(__file__).parents[2] / "support" / "dynolog" / "torch_loop.py"
    environ = {**os.environ, "SLURM_JOB_ID": "4711"}
    with subprocess.Popen(
        [sys.executable, str(loop)], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            script = sources() / "scripts" / "pytorch" / "unitrace.py"
            done = subprocess.run(
                [sys.executable, str(script), "4711", "--hosts", host, "-o", str(place), "-i", "2",
                 "--iteration-roundup", "1"],
                env={**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"},
                capture_output=True, text=True, timeout=scaled(60), check=True,
            )  # fmt: skip
            assert "Matched 1 processes" in done.stdout, done.stdout
            written = place / f"libkineto_trace_{host}_{process.pid}.json"
            assert noted_file(daemon, written)["decision"] == "written"
        finally:
            process.kill()
