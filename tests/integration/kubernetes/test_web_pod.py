"""The pod of components/web with its user, variables and certificates, without a cluster. Needs root.

The command, the variables and the patch of the daemons are the manifests' own; folders and ports are others, and a file
of hosts stands for the cluster's DNS.
"""

import gzip
import http.client
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import yaml
from kinetod.store.capture_store import Store
from support.peers.certificates import Authority, Pair, write_server_files
from support.peers.kubernetes import MANIFESTS, base_daemon_set, containers, patched
from support.service.daemon import IMPORT_PATH, free_address, running_daemon
from support.service.kept import put_capture
from support.trace_files import synthetic
from support.waiting import scaled, until
from support.web.browsing import Page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
ADA = "spiffe://cluster/ada"
CAPTURE = "20260101-000001-000-aaaaaa"
# Python may lie in /root here; in the image everybody can read it.
PYTHON_ANYWHERE = ["--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search"]
POD = yaml.safe_load((MANIFESTS / "components/web/deployment.yaml").read_text())["spec"]["template"]["spec"]


class WebPod:
    """kinetod-web below `root`, which its node's daemon at `daemon` (host:port) lets call for its users."""

    def __init__(self, root: Path, authority: Authority, daemon: str) -> None:
        (self.container,) = POD["containers"]
        self.root = root
        self.authority = authority
        self.address = free_address()
        self.environ = {each["name"]: self._here(each["value"]) for each in self.container["env"]}
        service, _, port = daemon.rpartition(":")
        name = self.environ["KINETOD_WEB_SERVICE"].partition(":")[0]
        (root / "hosts").write_text(f"{service} {name}\n127.0.0.1 localhost\n")
        self.environ |= {
            "KINETOD_WEB_SERVICE": f"{name}:{port}",
            "KINETOD_WEB_LISTEN": self.address,
            "KINETOD_WEB_ORIGIN": f"https://localhost:{self.address.rpartition(':')[2]}",
        }
        for secret, dns in (("kinetod-web-tls", "localhost"), ("kinetod-web-client", "kinetod-web.kineto.svc")):
            self._put(secret, authority.issue(dns=dns))
        (root / "tmp").mkdir()
        os.chown(root / "tmp", self._uid, self._uid)

    @property
    def _uid(self) -> int:
        return int(self.container["securityContext"]["runAsUser"])

    def _here(self, text: str) -> str:
        return text.replace("/etc/", f"{self.root}/etc/")

    def _put(self, secret: str, pair: Pair) -> None:
        """As the kubelet mounts it, with fsGroup and defaultMode."""
        folder = self.root / "etc" / secret
        folder.mkdir(parents=True)
        for name, pem in (("tls.crt", pair.certificate), ("tls.key", pair.key), ("ca.crt", self.authority.certificate)):
            (folder / name).write_bytes(pem)
            (folder / name).chmod(0o440)
            os.chown(folder / name, 0, POD["securityContext"]["fsGroup"])

    def command(self) -> list[str]:
        assert self.container["command"] == ["/opt/kinetod/bin/kinetod-web"]
        names = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount --bind "$0" /etc/hosts && exec "$@"',
            str(self.root / "hosts"),
        ]
        user = ["setpriv", "--reuid", str(self._uid), "--regid", str(self._uid), "--clear-groups", *PYTHON_ANYWHERE]
        user += ["--bounding-set", "-all,+dac_read_search", "--no-new-privs"]
        return [*names, *user, sys.executable, "-m", "kinetoctl.kinetod_web"]

    @contextmanager
    def running(self) -> Iterator[None]:
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": IMPORT_PATH, "TMPDIR": str(self.root / "tmp")}
        with (self.root / "log").open("wb") as log:
            process = subprocess.Popen(self.command(), env=environ | self.environ, stderr=log, stdin=subprocess.DEVNULL)
        try:
            until(lambda: self._accepts(process), "the pod is ready", 60, state=(self.root / "log").read_text)
            yield
        finally:
            process.terminate()
            assert process.wait(scaled(30)) == 0, (self.root / "log").read_text()

    def _accepts(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, (self.root / "log").read_text()
        try:
            return self.ask("/captures.json").status == 200
        except OSError:
            return False

    def ask(self, path: str) -> Page:
        """A request of Ada's browser. Raises OSError."""
        context = ssl.create_default_context(cadata=self.authority.certificate.decode())
        pair, file = self.authority.issue(uri=ADA), self.root / "ada.pem"
        file.write_bytes(pair.certificate + pair.key)
        context.load_cert_chain(file)
        port = int(self.address.rpartition(":")[2])
        with closing(http.client.HTTPSConnection("localhost", port, timeout=scaled(60), context=context)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return Page(answer.status, answer.read().decode(), dict(answer.getheaders()))

    def shown(self, path: str) -> str:
        """The content with its results, however long they take."""
        found: list[Page] = []

        def complete() -> bool:
            found[:] = [self.ask(path)]
            return found[0].status == 200 and "Refresh" not in found[0].headers

        until(complete, f"the results of {path}", state=lambda: f"{found} {(self.root / 'log').read_text()}")
        return found[0].text


@pytest.fixture
def pod() -> Iterator[WebPod]:
    root, authority = Path(tempfile.mkdtemp(prefix="kinetod-web-pod-")), Authority()
    root.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        store = Store(root / "state")
        put_capture(store, time.time_ns(), gzip.compress(synthetic.text(2_000).encode()), name=CAPTURE)
        store.close()
        write_server_files(root, authority.issue(dns="kinetod.kineto.svc"), authority.certificate)
        config = root / "config.toml"
        config.write_text(
            f'[access]\ntls_certificate = "{root}/server.pem"\ntls_key = "{root}/server.key"\n'
            f'tls_client_ca = "{root}/clients.pem"\n[access.certificates]\n"URI:{ADA}" = "viewer"\n'
        )
        front_end = containers(patched(base_daemon_set(), "web"))["kinetod"]
        environ = {each["name"]: each["value"] for each in front_end["env"]}
        address = free_address()
        options = ("--config", str(config), "--listen", address)
        stack.enter_context(running_daemon(*options, state_dir=root / "state", environ=environ))
        yield WebPod(root, authority, address)


def test_the_pod_shows_a_user_with_a_certificate_what_the_nodes_have(pod: WebPod) -> None:
    with pod.running():
        until(lambda: CAPTURE in (text := pod.shown("/")) and "unanswered" not in text, "the node is shown")
        assert "gemm" in pod.shown(f"/c/{CAPTURE}/view/kernels.json")  # by a process that it has confined
        assert "KINETO_TLS_NAME=kinetod.kineto.svc kinetoctl report --address 127.0.0.1" in pod.shown(f"/c/{CAPTURE}")
