"""Fifty browsers at once at kinetod-web, each with a certificate of its own, on a store of 1,000 captures.

    taskset -c 0,1 python tests/bench/web_load.py --seconds 60

A browser loads a page, and files of it that it does not have yet, over a connection that it keeps, thinks for two
seconds (as often as the list of captures renews itself), and loads the next one. Prints how long requests took, what
the processes of kinetod-web took of memory (PSS), and what became of a capture of a busy process during the load,
beside one without load.
"""

import argparse
import contextlib
import gzip
import http.client
import os
import random
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.store.capture_store import Store
from support.peers.certificates import Authority
from support.service.cli import wait_for_agent
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.service.kept import put_capture
from support.targets.programs import crunching, program
from support.trace_files import synthetic

CAPTURES = 1_000
EVENTS = 2_000
THINK_S = 2.0
TRACE_NS = 5_000_000_000
FILES = re.compile(r'(?:src|href)="(/static/[^"]+)"')
VIEWS = ("kernels", "overview", "operators")


@dataclass
class Tally:
    """What the browsers saw. taken: seconds of each request, by kind of page; statuses: how often each came."""

    taken: dict[str, list[float]] = field(default_factory=dict)
    files: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


class Visitor(threading.Thread):
    """One browser."""

    def __init__(self, number: int, port: int, tls: ssl.SSLContext, tally: Tally, until_s: float) -> None:
        super().__init__(daemon=True)
        self._random = random.Random(number)
        self._connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=tls)
        self._host = f"localhost:{port}"
        self._tally = tally
        self._kept: set[str] = set()
        self._until_s = until_s

    def run(self) -> None:
        """Looks at pages until the time is over."""
        time.sleep(self._random.random() * THINK_S)
        while time.monotonic() < self._until_s:
            try:
                kind, path = self._page()
                text = self._ask(path, self._tally.taken.setdefault(kind, []))
                for address in set(FILES.findall(text)) - self._kept:
                    self._ask(address, self._tally.files)
                    self._kept.add(address)
            except (OSError, http.client.HTTPException) as exc:
                self._tally.failures.append(repr(exc))
                self._connection.close()
            time.sleep(THINK_S)

    def _page(self) -> tuple[str, str]:
        """Its kind and its path."""
        capture = f"/c/{capture_id(self._random.randrange(20))}"  # newer ones are looked at
        view = f"{capture}/view/{self._random.choice(VIEWS)}"
        lists = [("captures", "/")] * 3 + [("processes", "/live"), ("SQL", "/sql")]
        return self._random.choice([*lists, ("a capture", capture), ("a view", view)])

    def _ask(self, path: str, taken: list[float]) -> str:
        begin = time.perf_counter()
        self._connection.request("GET", path, headers={"Host": self._host})
        answer = self._connection.getresponse()
        content = answer.read()
        taken.append(time.perf_counter() - begin)
        self._tally.statuses[answer.status] = self._tally.statuses.get(answer.status, 0) + 1
        return content.decode()


def capture_id(number: int) -> str:
    """The number-th newest capture."""
    return f"20260101-000000-{number:06d}"


def fill(state: Path) -> None:
    """Puts the captures into a store."""
    store, content = Store(state), gzip.compress(synthetic.text(EVENTS).encode())
    now_ns = time.time_ns()
    for number in range(CAPTURES):
        put_capture(store, now_ns - number * 10**9, content, uid=61_000, name=capture_id(number))
    store.close()


@contextlib.contextmanager
def serving(folder: Path, daemon: Daemon, port: int) -> Iterator[psutil.Process]:
    """kinetod-web in a process of its own."""
    options = {
        "--origin": f"https://localhost:{port}", "--listen": f"127.0.0.1:{port}", "--address": daemon.address,
        "--tls-certificate": folder / "s.pem", "--tls-key": folder / "s.key", "--tls-client-ca": folder / "ca.pem",
    }  # fmt: skip
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "kinetoctl.kinetod_web", *words]
    with subprocess.Popen(command, env=daemon.client_environ()) as process:
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                if process.poll() is not None:
                    raise SystemExit("kinetod-web has ended")
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def memory_mib(server: psutil.Process) -> float:
    """What the server's processes take together."""
    total = 0
    for each in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.Error, PermissionError):
            total += each.memory_full_info().pss
    return total / 2**20


def traced(daemon: Daemon, pid: int) -> str:
    """What becomes of a capture of the process."""
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=TRACE_NS)
    stub = daemon.stub()
    created = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec, idempotency_key=str(time.time_ns())), timeout=30)
    (target,) = watch_to_end(stub, created.id).targets
    losses = ", ".join(f"{each.source} {each.records} records, {each.dropped} dropped" for each in target.counts)
    return f"{pb.Verdict.Name(target.verdict)} {target.reason_code} ({losses})"


def percentile(values: list[float], share: float) -> float:
    """In ms."""
    return 1000 * statistics.quantiles(values, n=1000)[round(1000 * share) - 1]


def measure(folder: Path, browsers: int, seconds: float) -> None:
    """Runs everything and prints."""
    authority = Authority()
    server = authority.issue(dns="localhost")
    for name, pem in (("s.pem", server.certificate), ("s.key", server.key), ("ca.pem", authority.certificate)):
        (folder / name).write_bytes(pem)
    names = [f"browser{number}.example" for number in range(browsers)]
    grants = "\n".join(f'"DNS:{name}" = "viewer"' for name in names)
    config = folder / "config.toml"
    config.write_text(f'[access]\nweb_proxies = ["root"]\n[access.certificates]\n{grants}\n')
    fill(folder / "state")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        running_daemon("--config", str(config), state_dir=folder / "state") as daemon,
        program(crunching(), daemon, quiet=True) as child,
        serving(folder, daemon, port) as web,
    ):
        wait_for_agent(daemon, child.pid)
        print(f"capture without load: {traced(daemon, child.pid)}")
        tally, most = Tally(), 0.0
        until_s = time.monotonic() + seconds
        visitors = []
        for number, name in enumerate(names):
            pair, file = authority.issue(dns=name), folder / f"{name}.pem"
            file.write_bytes(pair.certificate + pair.key)
            context = ssl.create_default_context(cadata=authority.certificate.decode())
            context.load_cert_chain(file)
            visitors.append(Visitor(number, port, context, tally, until_s))
        for visitor in visitors:
            visitor.start()
        time.sleep(seconds / 4)
        print(f"capture under load:   {traced(daemon, child.pid)}")
        while time.monotonic() < until_s:
            most = max(most, memory_mib(web))
            time.sleep(1)
        for visitor in visitors:
            visitor.join()
        report(tally, max(most, memory_mib(web)))


def report(tally: Tally, memory: float) -> None:
    """Prints the figures."""
    everything = [taken for values in tally.taken.values() for taken in values]
    for what, values in (("pages", everything), *sorted(tally.taken.items()), ("files", tally.files)):
        shown = ", ".join(f"p{round(100 * share)} {percentile(values, share):.0f} ms" for share in (0.5, 0.95, 0.99))
        print(f"{what}: {len(values)} requests, {shown}, longest {1000 * max(values):.0f} ms")
    print(f"statuses: {dict(sorted(tally.statuses.items()))}; failures: {len(tally.failures)} {tally.failures[:3]}")
    print(f"memory of kinetod-web: {memory:.0f} MiB; load of the machine: {os.getloadavg()[0]:.1f}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--browsers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.browsers, options.seconds)


if __name__ == "__main__":
    main()
