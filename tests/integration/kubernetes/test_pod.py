"""The pod of deploy/kubernetes with the users and capabilities that its manifest gives, without a cluster. Needs root.

The commands, probes and configuration are the manifest's own; only the folders are others.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.peers.kubelet import GPU_0, LLAMA, running_kubelet
from support.peers.kubelet import pod as resources
from support.peers.kubernetes import MANIFESTS, base_daemon_set, containers, patched
from support.service import subjects
from support.service.attach_service import OWNER_UID, as_caller, unprivileged
from support.service.cli import run_process
from support.service.daemon import IMPORT_PATH, patient_deadlines
from support.waiting import scaled, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
MODULES = {
    "/opt/kinetod/bin/kinetod": ["-m", "kinetod"],
    "/opt/kinetod/bin/kinetod-attach": ["-m", "kinetod.attach_helper"],
    "/opt/kinetod/bin/kinetod-counters": ["-m", "kinetod.counters"],
    "/opt/kinetod/bin/python3": [],
}
# Python may lie in /root here; in the image everybody can read it.
PYTHON_ANYWHERE = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search"]


class Pod:
    """Its folders below `root`, and its containers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.containers = containers(patched(base_daemon_set(), "counters"))
        self._running: list[subprocess.Popen[bytes]] = []
        for folder in (*self.folders(), "run/kinetod-attach", "run/kinetod-counters", "etc/kinetod"):
            (root / folder).mkdir(parents=True)
        for folder in ("run/kinetod-attach", "run/kinetod-counters"):
            (root / folder).chmod(0o777)  # as the kubelet makes an emptyDir
        for name in ("config.toml", "attach.toml"):
            (root / "etc/kinetod" / name).write_text(self.here((MANIFESTS / "base" / name).read_text()))

    def folders(self) -> list[str]:
        """Those of the node that the front end gets, in the order in which the kubelet makes them."""
        volumes = base_daemon_set()["spec"]["template"]["spec"]["volumes"]
        paths = {volume["name"]: volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
        return [paths[mount["name"]].lstrip("/") for mount in self.containers["folders"]["volumeMounts"]]

    def here(self, text: str) -> str:
        for folder in ("/run/kineto", "/var/lib/kineto", "/var/lib/kubelet", "/etc/kinetod"):
            text = text.replace(folder, f"{self.root}{folder}")
        return text

    def command(self, name: str, command: list[str]) -> list[str]:
        """As that container runs it."""
        security = self.containers[name]["securityContext"]
        added = [f"+{each.lower()}" for each in security["capabilities"].get("add", [])]
        user = ["--reuid", str(security["runAsUser"]), "--regid", str(security["runAsGroup"]), "--clear-groups"]
        if security["runAsUser"] != 0:
            added, user = ["+dac_read_search"], [*user, *PYTHON_ANYWHERE]
        if not security["allowPrivilegeEscalation"]:
            user.append("--no-new-privs")
        program, *arguments = map(self.here, command)
        program = program.removeprefix(str(self.root))
        start = [sys.executable, *MODULES[program]] if program in MODULES else [program]
        return ["setpriv", *user, "--bounding-set", ",".join(["-all", *added]), *start, *arguments]

    def environ(self) -> dict[str, str]:
        return {**os.environ, **patient_deadlines(), "PYTHONPATH": IMPORT_PATH, "KINETOD_MIN_FREE_BYTES": "1MiB",
                "KINETOD_STORE_START_FREE_BYTES": "0", "KINETOD_STORE_MIN_FREE_PERCENT": "0"}  # fmt: skip

    def run(self, name: str) -> int:
        """A container that ends."""
        return subprocess.run(self.command(name, self.containers[name]["command"]), check=False).returncode

    def start(self, name: str) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            command = self.command(name, self.containers[name]["command"])
            self._running.append(subprocess.Popen(command, env=self.environ(), stdin=subprocess.DEVNULL, stderr=log))

    def probe(self, name: str, probe: str) -> bool:
        command = self.command(name, self.containers[name][probe]["exec"]["command"])
        return subprocess.run(command, env=self.environ(), stderr=subprocess.DEVNULL, check=False).returncode == 0

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.root.glob("*.log")))

    def stop(self) -> list[int]:
        for process in self._running:
            process.terminate()
        return [process.wait(scaled(30)) for process in self._running]

    def mode(self, path: str) -> tuple[int, int, int]:
        """Mode, user and group."""
        status = (self.root / path).stat()
        return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid


@pytest.fixture
def pod() -> Iterator[Pod]:
    root = Path(tempfile.mkdtemp(prefix="kinetod-pod-"))
    root.chmod(0o755)
    made = Pod(root)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(root, ignore_errors=True)


def verdicts(pod: Pod, pid: int, folder: Path) -> list[Any]:
    environ = {**pod.environ(), "KINETO_ADDRESS": "unix:/run/kineto/kinetod.sock"}
    # As on a node, where root's /run vouches for the user of the front end.
    node = ("unshare", "--mount", "sh", "-c", f'mount --bind {pod.root}/run /run && exec "$@"', "sh")
    arguments = ["trace", "--pid", str(pid), "--duration", "100ms", "-o", "json"]
    result = run_process(arguments, environ, folder, prefix=node)
    assert result.code == 0, (result.stderr, pod.log())
    return [target["verdict"] for target in result.json()["targets"]]


def test_the_pod_s_permissions_are_enough_to_be_well_and_to_trace_another_users_process(
    pod: Pod, tmp_path: Path
) -> None:
    assert not pod.probe("kinetod", "livenessProbe")
    assert pod.run("folders") == 0 == pod.run("folders")  # the node's folders stay from pod to pod
    pod.start("attach")
    pod.start("kinetod")
    until(lambda: pod.probe("attach", "startupProbe"), "the helper answers", 60, state=pod.log)
    until(lambda: pod.probe("kinetod", "startupProbe"), "the daemon serves", 60, state=pod.log)
    assert pod.probe("kinetod", "livenessProbe") and pod.probe("kinetod", "readinessProbe")
    with subjects.python("import threading", prefix=tuple(unprivileged(OWNER_UID, "dac_read_search"))) as pid:
        assert verdicts(pod, pid, tmp_path) == ["VERDICT_DONE"]
    # What a training pod mounts has no clients' socket; gRPC's own one, where nobody is known, is closed.
    found = {path.name for path in (pod.root / "run/kineto-agent").iterdir()}
    assert found == {"agent.sock", "agent.sock.lock", "agent.sock.grpc"}
    assert pod.mode("run/kineto-agent/agent.sock.grpc") == (0o700, 64970, 64970)
    assert pod.mode("run/kineto-agent/agent.sock") == (0o666, 64970, 64970)
    assert pod.mode("run/kinetod-attach/attach.sock") == (0o660, 0, 64970)
    assert pod.mode("var/lib/kineto") == (0o700, 64970, 64970)
    assert pod.stop() == [0, 0]


def test_what_a_front_end_that_was_taken_over_puts_in_the_place_of_a_folder_gives_it_none_of_the_nodes(
    pod: Pod,
) -> None:
    (pod.root / "etc/of-the-node").mkdir()
    assert pod.run("folders") == 0
    for folder in map(str, pod.folders()):  # it has their contents, and may not have their names
        swap = 'mv -T "$0" "$0.gone"; ln -sT "$1" "$0"'
        arguments = ["sh", "-c", swap, str(pod.root / folder), str(pod.root / "etc/of-the-node")]
        subprocess.run(["setpriv", "--reuid=64970", "--regid=64970", "--clear-groups", *arguments], check=False)
    assert pod.run("folders") == 0  # of the next pod
    assert pod.mode("etc/of-the-node")[1:] == (0, 0)


COUNTERS = """
import asyncio, sys
from pathlib import Path
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.interface import CounterError
from kinetod.counters.counter_client import CountersService
try:
    print(len(asyncio.run(CounterClient(CountersService(Path(sys.argv[1]))).gpus()).gpus), "GPUs")
except CounterError as exc:
    print(exc.code, exc)
"""


def test_the_sampler_of_counters_serves_the_front_end_and_nobody_else(pod: Pod) -> None:
    path = pod.root / "run/kinetod-counters/counters.sock"
    assert not pod.probe("counters", "livenessProbe")
    pod.start("counters")
    until(lambda: pod.probe("counters", "startupProbe"), "the sampler answers", 60, state=pod.log)
    assert pod.mode("run/kinetod-counters/counters.sock") == (0o660, 0, 64970)
    done = as_caller(64970, COUNTERS, str(path))
    assert done.stdout.startswith(("0 GPUs", "COUNTERS_UNAVAILABLE")), (done.stdout, done.stderr, pod.log())
    done = as_caller(OWNER_UID, COUNTERS, str(path))
    assert "Permission denied" in done.stdout, (done.stdout, done.stderr)
    assert pod.stop() == [0]


WHOSE = """
import asyncio, sys
from pathlib import Path
from kinetod.attach_helper.helper_client import HelperService
from kinetod.kubernetes.pod_names import KubeletClient, KubeletError
helper, direct = HelperService(Path(sys.argv[1])), Path(sys.argv[2])
for asked in (KubeletClient(connect=helper.kubelet), KubeletClient(direct)):
    try:
        print({gpu: list(map(str, holders)) for gpu, holders in asyncio.run(asked.gpus()).items()})
    except KubeletError as exc:
        print(exc)
"""


def test_the_front_end_asks_the_kubelet_over_the_helpers_connection_and_could_not_by_itself(pod: Pod) -> None:
    path = pod.root / "var/lib/kubelet/pod-resources/kubelet.sock"
    arguments = (str(pod.root / "run/kinetod-attach/attach.sock"), str(path))
    pod.start("attach")
    until(lambda: pod.probe("attach", "startupProbe"), "the helper answers", 60, state=pod.log)
    done = as_caller(64970, WHOSE, *arguments)
    assert "no connection could be made through the attach helper" in done.stdout, done.stderr
    assert "No such file" in done.stdout, done.stderr
    with running_kubelet(path, resources(LLAMA, "nvidia.com/gpu", GPU_0)):
        done = as_caller(64970, WHOSE, *arguments)
    by_helper, by_itself = done.stdout.splitlines()
    assert by_helper == str({GPU_0: ["training/llama-0/trainer"]}), (done.stderr, pod.log())
    assert "Permission denied" in by_itself
