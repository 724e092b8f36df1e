"""Kubernetes pods as places: the nodes on which they run, and the kinetod of each node.

Theory of operation
    The API server says which pods are selected, on which nodes, and which pod of the DaemonSet runs on each. If the
    variables for certificates are set, that pod is called at its own address. Otherwise the call goes through the API
    server, as with `kubectl port-forward`: users who may forward ports to kinetod's pods need no other network path.
    The token of the kubeconfig then identifies the caller, and the daemon asks the API server what this user may trace.

    All questions go through the official client, which is imported only here.
"""

import atexit
import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kineto_protos import endpoints
from kineto_protos.endpoints import KINETOD_NAMESPACE
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.install_advice import install_advice

from kinetoctl.client.channel import show_token
from kinetoctl.client.slurm import few
from kinetoctl.errors import CliError, KubeDenied, KubeFailed, NoKinetod, NoSuchPod, PodNotRunning

CHUNK_BYTES = 256 << 10
Connect = Callable[[], socket.socket]


# Tunnels: local sockets whose connections are forwarded through connections that a function makes.
# The sockets lie in a folder that only this user can enter. It is removed when the tunnels are closed, at the latest
# when the process ends.
@dataclass(frozen=True, slots=True)
class _Tunnel:
    """waiting: remote connections that are not in use yet; taken: local ends of connections in use."""

    name: str
    listener: socket.socket
    connect: Connect
    tell: Callable[[str], None]
    waiting: list[socket.socket]
    taken: set[socket.socket]


class Tunnels:
    """A set of tunnels. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._made = 0
        self._open: list[_Tunnel] = []
        atexit.register(self.close)

    def close(self) -> None:
        """Closes all tunnels and their connections. New tunnels may be opened afterwards."""
        with self._lock:
            for tunnel in self._open:
                with contextlib.suppress(OSError):
                    tunnel.listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
                tunnel.listener.close()
                while tunnel.waiting:
                    tunnel.waiting.pop().close()
                for near in tunnel.taken:
                    with contextlib.suppress(OSError):
                        near.shutdown(socket.SHUT_RDWR)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._open, self._folder = [], None

    def nowhere(self, name: str) -> str:
        """An address at which nothing answers."""
        with self._lock:
            return f"unix:{self._path(name)}"

    def open(self, name: str, connect: Connect, first: socket.socket | None, tell: Callable[[str], None]) -> str:
        """Opens a tunnel and returns its gRPC address.

        first: an existing remote connection; tell: receives the reason if a connection fails.
        """
        with self._lock:
            path = self._path(name)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            listener.listen()
            tunnel = _Tunnel(name, listener, connect, tell, [first] if first is not None else [], set())
            self._open.append(tunnel)
        threading.Thread(target=self._serve, args=(tunnel,), name=name, daemon=True).start()
        return f"unix:{path}"

    def _path(self, name: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kinetoctl-"))  # mode 0700
        self._made += 1
        return self._folder / f"{self._made}-{name[:40]}.sock"

    def _serve(self, tunnel: _Tunnel) -> None:
        while True:
            try:
                near, _ = tunnel.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._join, args=(tunnel, near), name=tunnel.name, daemon=True).start()

    def _join(self, tunnel: _Tunnel, near: socket.socket) -> None:
        with near:
            with self._lock:
                first = tunnel.waiting.pop() if tunnel.waiting else None
            try:
                far = first or tunnel.connect()
            except CliError as exc:
                tunnel.tell(f"{tunnel.name}: {exc}")
                return
            with self._lock:
                tunnel.taken.add(near)
            back = threading.Thread(target=_pass_on, args=(far, near), name=tunnel.name, daemon=True)
            back.start()
            _pass_on(near, far)
            back.join()
            with self._lock:
                tunnel.taken.discard(near)
            far.close()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Forwards data until one end closes, then shuts both down."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


DEADLINE_S = (5.0, 30.0)  # to connect, and between two parts of an answer
ANSWER_S = 60.0  # for the whole of one, and for a connection to a port: not all that the library does has a deadline
LIST_S = 300.0  # for all pages of a list
PAGE = 500
MAX_ANSWER_BYTES = 256 << 20  # of a page; pods are some KiB each, at most 1.5 MiB
KINETOD_LABELS = "app.kubernetes.io/name=kinetod"
CERTIFICATES_PORT, TOKENS_PORT = "grpc", "tokens"  # as the manifests call them
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # RFC 1123
TUNNELS = Tunnels()  # of this process
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeTarget:
    """What --kube names. pod: empty for the pods that -l selects."""

    namespace: str
    pod: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}" if self.pod else self.namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeOptions:
    """The command line's options for Kubernetes. selector: label selector; namespace: that of kinetod."""

    targets: tuple[KubeTarget, ...]
    selector: str = ""
    context: str | None = None
    kubeconfig: str | None = None
    namespace: str = KINETOD_NAMESPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class KubePlace:
    """The place of one node: see Place."""

    node: str
    address: str
    selector: pb.Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The part of a pod's description that is needed."""

    namespace: str
    name: str
    uid: str
    node: str
    phase: str
    address: str
    ready: bool
    ports: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_kube(text: str) -> KubeTarget:
    """NAMESPACE/POD or NAMESPACE. Raises ValueError."""
    namespace, slash, pod = text.partition("/")
    if not _NAME.fullmatch(namespace) or (slash and not _NAME.fullmatch(pod)):
        raise ValueError(f"expected NAMESPACE/POD, or NAMESPACE with -l, got {text!r:.200}")
    return KubeTarget(namespace=namespace, pod=pod)


def kube_places(
    options: KubeOptions,
    tell: Callable[[str], None],
    *,
    tunnels: Tunnels = TUNNELS,
    environ: Mapping[str, str] = os.environ,
) -> list[KubePlace]:
    """One place for each node on which the pods run, ordered by name. Raises ValueError, CliError."""
    for target in options.targets:
        if bool(target.pod) == bool(options.selector):
            raise ValueError(
                f"--kube {target}: name a pod (NAMESPACE/POD) or select pods by their labels (-l KEY=VALUE)"
                f"{', not both' if target.pod else ''}"
            )
    with contextlib.closing(Cluster(options.context, options.kubeconfig, environ)) as cluster:
        return _places(cluster, options, tell, tunnels, environ)


def _places(
    cluster: "Cluster",
    options: KubeOptions,
    tell: Callable[[str], None],
    tunnels: Tunnels,
    environ: Mapping[str, str],
) -> list[KubePlace]:
    by_node: dict[str, list[Pod]] = {}
    for pod in _running(cluster, options, tell):
        by_node.setdefault(pod.node, []).append(pod)
    daemons = _daemons(cluster, options.namespace, by_node, tell)
    certificates = bool(environ.get(endpoints.TLS_VARIABLES[0]))
    reach = _Reach(cluster, tunnels, tell) if not certificates else None
    return [
        KubePlace(
            node=node,
            address=_direct(daemons.get(node), node, tunnels) if reach is None else reach(daemons.get(node), node),
            selector=pb.Selector(pod_uids=sorted({pod.uid for pod in pods})),
        )
        for node, pods in sorted(by_node.items())
    ]


def namespace_of(context: str | None, kubeconfig: str | None) -> str:
    """The namespace that kubectl would use. Raises KubeFailed."""
    return Cluster(context, kubeconfig).namespace(context, kubeconfig or os.environ.get("KUBECONFIG") or None)


def _running(cluster: "Cluster", options: KubeOptions, tell: Callable[[str], None]) -> list[Pod]:
    """The selected pods that are running. Raises NoSuchPod, PodNotRunning."""
    found: dict[str, Pod] = {}
    waiting: list[Pod] = []
    for target in options.targets:
        if target.pod:
            pods = [cluster.pod(target.namespace, target.pod)]
        else:
            pods = cluster.pods(target.namespace, options.selector)
            if not pods:
                raise NoSuchPod(f"no pod in the namespace {target} has the labels {options.selector}")
        waiting += [pod for pod in pods if not _runs(pod)]
        found |= {pod.uid: pod for pod in pods if _runs(pod)}
    if waiting and (not found or any(target.pod for target in options.targets)):
        pod = waiting[0]
        raise PodNotRunning(
            f"the pod {pod} is not running: it is {pod.phase or 'not scheduled'}; `kubectl -n {pod.namespace} describe "
            f"pod {pod.name}` shows why"
        )
    if waiting:
        tell(f"left out because they are not running: {few(sorted(map(str, waiting)))}")
    return list(found.values())


def _runs(pod: Pod) -> bool:
    return pod.phase == "Running" and bool(pod.node)


def _daemons(
    cluster: "Cluster", namespace: str, by_node: Mapping[str, Sequence[Pod]], tell: Callable[[str], None]
) -> dict[str, Pod]:
    """kinetod's pods by node. Raises NoKinetod if none of these nodes has one."""
    found = {pod.node: pod for pod in cluster.pods(namespace, KINETOD_LABELS) if _runs(pod)}
    where = f"`kubectl -n {namespace} get pods -o wide -l {KINETOD_LABELS}` shows where it is running"
    if missing := [node for node in by_node if node not in found]:
        text = f"kinetod is not running on {few(sorted(missing))}, where {by_node[missing[0]][0]} is; {where}"
        if len(missing) == len(by_node):
            raise NoKinetod(text)
        tell(text)
    for node in by_node:
        if node in found and not found[node].ready:
            tell(
                f"kinetod on {node} ({found[node]}) is not ready; see `kubectl -n {namespace} logs {found[node].name}`"
            )
    return found


def _direct(daemon: Pod | None, node: str, tunnels: Tunnels) -> str:
    if daemon is None:
        return tunnels.nowhere(node)
    port = _port(daemon, CERTIFICATES_PORT, "components/remote")
    return f"[{daemon.address}]:{port}" if ":" in daemon.address else f"{daemon.address}:{port}"


def _port(daemon: Pod, name: str, component: str) -> int:
    """Raises NoKinetod."""
    if name not in daemon.ports:
        raise NoKinetod(
            f"kinetod's pod {daemon} has no port {name!r}: it was installed without {component} "
            "(to add it, see docs/kubernetes.md)"
        )
    return daemon.ports[name]


class _Reach:
    """Addresses of kinetod's pods through the API server. Connects to the first at once, so that errors show early."""

    def __init__(self, cluster: "Cluster", tunnels: Tunnels, tell: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._tunnels = tunnels
        self._tell = tell
        self._first = True
        cluster.token()

    def __call__(self, daemon: Pod | None, node: str) -> str:
        """Raises KubeDenied, KubeFailed, NoKinetod."""
        if daemon is None:
            return self._tunnels.nowhere(node)
        port = _port(daemon, TOKENS_PORT, "components/permission")

        def connect() -> socket.socket:
            return self._cluster.forward(daemon, port)

        address = self._tunnels.open(node, connect, connect() if self._first else None, self._tell)
        self._first = False
        show_token(address, self._cluster.token)
        return address


class Cluster:
    """A client of the API server. context, kubeconfig: None for the usual ones, or, in a pod, its service account."""

    def __init__(self, context: str | None, kubeconfig: str | None, environ: Mapping[str, str] = os.environ) -> None:
        """Raises KubeFailed."""
        try:
            import kubernetes
            import kubernetes.stream
        except ImportError as exc:
            advice = install_advice("kubernetes")
            raise KubeFailed(f"--kube needs the official Kubernetes client, which is not installed: {advice}") from exc
        self._kubernetes: Any = kubernetes
        self._configuration: Any = kubernetes.client.Configuration()
        self._load(context, kubeconfig or environ.get("KUBECONFIG") or None)
        self._configuration.retries = 0
        self._api: Any = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(self._configuration))
        self._where = str(self._configuration.host)

    def namespace(self, context: str | None, kubeconfig: str | None) -> str:
        """The namespace of the context, or "default" if it names none."""
        with contextlib.suppress(self._kubernetes.config.ConfigException):
            contexts, active = self._kubernetes.config.list_kube_config_contexts(kubeconfig)
            chosen = next((each for each in contexts if each["name"] == context), active)
            return str(chosen["context"].get("namespace") or "default")
        return "default"

    def _load(self, context: str | None, kubeconfig: str | None) -> None:
        config = self._kubernetes.config
        in_pod = context is None and kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            if in_pod and not Path("~/.kube/config").expanduser().exists():
                config.load_incluster_config(client_configuration=self._configuration)
            else:
                config.load_kube_config(kubeconfig, context, client_configuration=self._configuration)
        except (config.ConfigException, OSError, ValueError) as exc:
            raise KubeFailed(
                f"the kubeconfig cannot be used: {exc}; choose another file with --kubeconfig, or another "
                "context with --kube-context"
            ) from exc

    def close(self) -> None:
        """Closes the connections to the API server except forwarded ports. The object stays usable."""
        self._api.api_client.rest_client.pool_manager.clear()

    def token(self) -> str:
        """The current bearer token. Raises KubeFailed."""
        settings = self._configuration.auth_settings().get("BearerToken", {})
        kind, _, token = str(settings.get("value") or "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise KubeFailed(
                "the user of this kubeconfig has no token (it may use a certificate), and kinetod identifies callers "
                "by their tokens: use a context with a token, for example from `kubectl create token`"
            )
        return token

    def pod(self, namespace: str, name: str) -> Pod:
        """One pod. Raises NoSuchPod, KubeDenied, KubeFailed."""
        with self._told(f"get the pod {namespace}/{name}"):
            return _pod(self._asked(self._api.read_namespaced_pod, name, namespace))

    def pods(self, namespace: str, labels: str) -> list[Pod]:
        """The pods with these labels. Raises KubeDenied, KubeFailed."""
        found: list[Pod] = []
        more, began = None, time.monotonic()
        while True:
            with self._told(f"list pods in the namespace {namespace}"):
                options = {"label_selector": labels, "limit": PAGE, **({"_continue": more} if more else {})}
                page = self._asked(self._api.list_namespaced_pod, namespace, **options)
                if time.monotonic() - began > LIST_S:
                    raise TimeoutError(f"the list was not complete after {LIST_S:g} s")
            found += map(_pod, page.get("items", ()))
            if not (more := page.get("metadata", {}).get("continue")):
                return found

    def forward(self, pod: Pod, port: int) -> socket.socket:
        """A connection to a port of a pod. Raises KubeDenied, KubeFailed."""
        # A client of its own: the library changes it while it connects.
        api = self._kubernetes.client.CoreV1Api(self._kubernetes.client.ApiClient(self._configuration))
        with self._told(f"forward ports to {pod} (pods/portforward)"):
            try:
                forward = _within(
                    ANSWER_S,
                    lambda: self._kubernetes.stream.portforward(
                        api.connect_get_namespaced_pod_portforward, pod.name, pod.namespace, ports=str(port)
                    ),
                )
            except (self._kubernetes.client.ApiException, AttributeError) as exc:
                raise self._refusal(exc) from exc
        found: socket.socket = forward.socket(port)
        return found

    def _refusal(self, error: BaseException) -> BaseException:
        """The server's answer to a WebSocket request. The library has it only as a text, and before 37 loses it."""
        causes = [error]
        while (cause := causes[-1].__context__) is not None:
            causes.append(cause)
        for cause in causes:
            if status := getattr(cause, "status_code", 0):
                refusal: BaseException = self._kubernetes.client.ApiException(status=status)
                vars(refusal)["body"] = getattr(cause, "resp_body", b"")
                return refusal
        return next((each for each in causes if isinstance(each, self._kubernetes.client.ApiException)), error)

    def _asked(self, call: Callable[..., Any], *arguments: str, **options: Any) -> Any:
        def ask() -> Any:
            answer = call(*arguments, **options, _preload_content=False, _request_timeout=DEADLINE_S)
            said = answer.read(MAX_ANSWER_BYTES + 1)
            answer.release_conn()
            if len(said) > MAX_ANSWER_BYTES:
                raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
            return json.loads(said)

        return _within(ANSWER_S, ask)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Translates the library's errors. what: the action, as in "cannot …"."""
        import urllib3

        try:
            yield
        except self._kubernetes.client.ApiException as exc:
            said = _message(exc)
            if exc.status == 404:
                raise NoSuchPod(f"cannot {what}: {said}") from exc
            if exc.status in (401, 403):
                raise KubeDenied(f"Kubernetes does not let you {what}: {said}") from exc
            raise KubeFailed(f"cannot {what}: the API server ({self._where}) answered {exc.status}: {said}") from exc
        except (OSError, ValueError, urllib3.exceptions.HTTPError) as exc:
            raise KubeFailed(f"cannot {what}: no usable answer from the API server ({self._where}): {exc}") from exc


def _within(deadline_s: float, call: Callable[[], T]) -> T:
    """The result of a call. A call that takes longer is abandoned in a daemon thread. Raises OSError."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as exc:  # noqa: BLE001  # whoever waits gets it
            done.set_exception(exc)

    threading.Thread(target=run, name="API server", daemon=True).start()
    if not wait({done}, deadline_s).done:
        raise TimeoutError(f"the call did not finish within {deadline_s:g} s")
    return done.result()


def _message(exc: Any) -> str:
    """The API server's own message, if there is one."""
    try:
        return str(json.loads(exc.body)["message"])
    except (ValueError, TypeError, KeyError):
        return str(exc.reason or exc.body or "no reason given").strip()[:500]


def _pod(resource: Mapping[str, Any]) -> Pod:
    metadata, spec, status = (resource.get(part) or {} for part in ("metadata", "spec", "status"))
    ports = [port for container in spec.get("containers", ()) for port in container.get("ports") or ()]
    conditions = {each.get("type"): each.get("status") for each in status.get("conditions") or ()}
    return Pod(
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        node=spec.get("nodeName", ""),
        phase=status.get("phase", "") if not metadata.get("deletionTimestamp") else "Terminating",
        address=status.get("podIP", ""),
        ready=conditions.get("Ready") == "True",
        ports={port["name"]: port["containerPort"] for port in ports if port.get("name")},
    )
