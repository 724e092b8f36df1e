"""Everything in examples/ runs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import kubernetes_validate
import pytest
import yaml
from kineto_agent import __version__
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.app import cli
from support.peers.slurm import ADA, running_cluster, why_not
from support.service.cli import environment
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.targets.programs import crunching, program, ready_pids
from support.waiting import scaled, until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
JOB = ROOT / "tests/data/h200/ddp4"
SECRET = b"a secret of some length"
MANIFESTS = tuple(yaml.safe_load_all((EXAMPLES / "kubernetes/nightly-trace.yaml").read_text()))


def run(name: str, *arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, env=environment(**environ), cwd=cwd, capture_output=True, text=True, timeout=90)


def test_every_example_is_listed() -> None:
    files = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.is_file()}
    listed = re.findall(r"\]\(([^)]*)\)", (EXAMPLES / "README.md").read_text())
    shown = {Path(name) for name in listed if not name.startswith("..")} | {Path("README.md")}
    assert {path for path in files if not any(part.startswith((".", "__pycache__")) for part in path.parts)} == shown


@pytest.mark.slow
def test_a_program_traces_a_process_and_reads_its_analysis(tmp_path: Path) -> None:
    with running_daemon() as daemon, program(crunching(), daemon) as process:
        until(lambda: process.pid in ready_pids(daemon.stub()), "the agent is connected")
        done = run("trace_from_python.py", str(process.pid), cwd=tmp_path, KINETO_ADDRESS=daemon.address)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^pid {process.pid} on \S+: DONE$", done.stdout, re.MULTILINE)
    assert "crunch_numbers" in done.stdout
    assert len(list(tmp_path.rglob("*.json.gz"))) >= 1


def test_the_program_ends_with_the_code_of_kinetoctl(tmp_path: Path) -> None:
    done = run("trace_from_python.py", "1234", cwd=tmp_path, KINETO_ADDRESS=f"unix:{tmp_path}/nothing.sock")
    assert (done.returncode, done.stdout) == (7, "")
    assert "nothing.sock" in done.stderr


def test_the_analysis_of_ones_own_tells_the_iterations_of_four_ranks(tmp_path: Path) -> None:
    done = run("custom_analysis.py", str(JOB), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["rank", "iteration", "total", "computing", "exposed", "idle", "ms"]
    rows = [line.split() for line in lines]
    assert [(row[0], len([r for r in rows if r[0] == row[0]])) for row in rows[::4]] == [(str(n), 4) for n in range(4)]
    for _, _, total, *parts in rows:
        assert float(total) == pytest.approx(sum(map(float, parts)), abs=0.02)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "analyse_job.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=90, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = {cell.id: str(cell.get("outputs")) for cell in notebook.cells}
    assert "Source of rank 3: " in shown["setup"] and "rank3.json.gz" in shown["setup"]
    assert "utilization_pct" in shown["overview"] and "image/png" in shown["plot"]
    assert "Matrix products do not use the tensor cores" in shown["findings"]
    assert "774 kernels" in shown["columns"] and "Trace of rank 0 of 4" in shown["columns"]
    assert "aten::mm" in shown["sql"]


# ---------------------------------------------------------------- webhooks


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Its address and its process."""
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    (tmp_path / "secret").chmod(0o600)
    command = [
        sys.executable,
        str(EXAMPLES / "webhook_receiver.py"),
        "--port",
        "0",
        "--secret",
        str(tmp_path / "secret"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], process
        finally:
            process.kill()


def cancelled(daemon: Daemon) -> pb.Capture:
    """A capture that has ended without a trace."""
    stub = daemon.stub()
    (pid,) = ready_pids(stub)
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=60 * 10**9)
    created = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    stub.CancelCapture(pb.CancelCaptureRequest(id=created.id), timeout=scaled(10))
    return watch_to_end(stub, created.id)


@pytest.mark.slow
def test_the_receiver_of_webhooks_prints_what_kinetod_says(
    receiver: tuple[str, "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    address, process = receiver
    environ = {"KINETOD_HOOKS_WEBHOOK": address, "KINETOD_HOOKS_WEBHOOK_SECRET": str(tmp_path / "secret")}
    with running_daemon(environ=environ) as daemon, program(crunching(), daemon) as target:
        until(lambda: target.pid in ready_pids(daemon.stub()), "the agent is connected")
        ended = cancelled(daemon)
        assert process.stdout is not None
        assert process.stdout.readline() == f"capture {ended.id}: CANCELLED\n"
        assert process.stdout.readline().startswith(f"  pid {target.pid}: ")


def test_the_receiver_refuses_what_kinetod_has_not_signed(receiver: tuple[str, "subprocess.Popen[str]"]) -> None:
    address, _ = receiver
    command = ["curl", "--silent", "--output", os.devnull, "--write-out", "%{http_code}", "--data", "{}"]
    headers = ["--header", "webhook-id: a", "--header", "webhook-timestamp: 1", "--header", "webhook-signature: v1,é"]
    for more in ([], headers):
        done = subprocess.run([*command, *more, address], capture_output=True, text=True, check=True, timeout=20)
        assert done.stdout == "400"


# ---------------------------------------------------------------- Slurm


def test_the_job_script_is_right_bash() -> None:
    script = EXAMPLES / "slurm/traced_job.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.slow
def test_the_job_traces_its_ranks_while_they_train() -> None:
    if reason := why_not():
        pytest.skip(reason)
    train = "import os, time\nwhile not os.path.exists('{}'): time.sleep(0.001)"
    with running_cluster() as cluster:
        path = f"{Path(sys.executable).parent}:{cluster.environ['PATH']}"
        exports = f"--export=ALL,TRACE_AFTER=0,TRACE_DURATION=200ms,PATH={path},KINETO_HOST_ADDRESS={cluster.template}"
        stop, script = cluster.work / "stop", EXAMPLES / "slurm/traced_job.sbatch"
        program = [sys.executable, "-c", train.format(stop)]
        job = cluster.submit(f"--output={cluster.work}/log", exports, str(script), *program, uid=ADA)
        folder = cluster.work / f"traces-{job}"
        merged = until(lambda: list(folder.glob("*.json.gz")), "the ranks are traced", 60, state=cluster.logs)
        assert len(merged) == 1 and len(list(folder.glob("kineto-*/*.json.gz"))) == 2
        stop.touch()
        until(lambda: not cluster.run("squeue", "--noheader").stdout, "the job has ended", 60, state=cluster.logs)
        state = cluster.run("scontrol", "show", "job", str(job)).stdout
        assert "JobState=COMPLETED" in state and "ExitCode=0:0" in state


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_the_manifest_is_what_the_api_s_schema_says(version: str) -> None:
    for manifest in MANIFESTS:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_manifest_runs_a_command_that_there_is_in_the_image_of_this_version() -> None:
    (job,) = (each for each in MANIFESTS if each["kind"] == "CronJob")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"registry.example.com/kinetod:{__version__}"
    name, command, *arguments = container["command"]
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    known = {text for each in found.params for text in each.opts}
    assert name == "kinetoctl" and {each for each in arguments if each.startswith("-")} <= known
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted.keys() == {each["name"] for each in pod["volumes"]} and mounted["traces"] in arguments


def test_the_manifest_gives_the_rights_that_the_documentation_lists() -> None:
    roles = [each for each in MANIFESTS if each["kind"] == "Role"]
    rules = [(rule["resources"], rule["verbs"]) for role in roles for rule in role["rules"]]
    assert rules == [(["pods"], ["get", "list"]), (["pods/exec"], ["create"])]
    client = yaml.safe_load((ROOT / "deploy/kubernetes/components/permission/client-role.yaml").read_text())["metadata"]
    bindings = {each["metadata"]["namespace"]: each for each in MANIFESTS if each["kind"] == "RoleBinding"}
    assert bindings[client["namespace"]]["roleRef"]["name"] == client["name"]
    assert {each["subjects"][0]["name"] for each in bindings.values()} == {"tracer"}


def test_the_workflow_uses_commands_and_options_that_exist() -> None:
    workflow = yaml.safe_load((EXAMPLES / "github/step-time.yaml").read_text())
    script = "\n".join(step.get("run", "") for step in workflow["jobs"]["compare"]["steps"])
    lines = [line.strip() for line in script.splitlines() if line.strip().startswith("kinetoctl ")]
    assert len(lines) == 2
    for line in lines:
        command = cli.get_command(click.Context(cli), line.split()[1])
        assert command is not None
        known = {name for parameter in command.params for name in parameter.opts}
        assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= known, line
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=90).returncode == 0
