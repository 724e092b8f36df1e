"""An API server of Kubernetes of the tests' own: real HTTPS, its JSON, and forwarded ports over WebSockets.

What it is sent and what it answers is held against the API's schemas. It knows tokens, who may exec into what, pods,
and where a pod's port really is.
"""

import asyncio
import contextlib
import copy
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from aiohttp import WSMsgType, web

from support.peers.certificates import Authority

SCHEMAS = kubernetes_validate.latest_version()
PROTOCOL = "v4.channel.k8s.io"
ACCOUNT_TOKEN = "kinetods-own"
ACCOUNT = "system:serviceaccount:kineto:kinetod"


def pod(
    name: str, namespace: str = "training", *, uid: str = "", node: str = "node-1", **status: Any
) -> dict[str, Any]:
    """A pod as the API server describes it."""
    conditions = [{"type": "Ready", "status": "True"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "uid": uid or f"uid-of-{name}", "labels": {}},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "x", "ports": []}]},
        "status": {"phase": "Running", "podIP": "10.0.0.9", "conditions": conditions, **status},
    }


def kinetod(node: str = "node-1", ready: bool = True, **ports: int) -> dict[str, Any]:
    """kinetod's pod on a node. ports: by name."""
    conditions = [{"type": "Ready", "status": str(ready)}]
    made = pod(f"kinetod-{node}", "kineto", node=node, conditions=conditions)
    made["metadata"]["labels"] = {"app.kubernetes.io/name": "kinetod"}
    made["spec"]["containers"][0]["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
    return made


@dataclass
class ApiServer:
    """The server and what it knows; tests change it while it runs."""

    folder: Path
    users: dict[str, dict[str, Any]] = field(default_factory=dict)  # by token
    execs: set[tuple[str, str, str]] = field(default_factory=set)  # user, namespace, pod
    pods: list[dict[str, Any]] = field(default_factory=list)
    forbidden: set[tuple[str, str]] = field(default_factory=set)  # user, and how the path ends
    addresses: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)  # of a pod's port
    requests: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path, body
    silent: bool = False
    held: str = ""  # a user of whom it is not said what they may do, as long as the name stands here
    port: int = 0

    @property
    def account(self) -> Path:
        """The folder that a pod gets."""
        return self.folder / "account"

    @property
    def environ(self) -> dict[str, str]:
        """Variables of a process in a pod."""
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}

    def asked(self, path: str) -> list[Any]:
        """Requests to paths with this ending."""
        return [body for _, each, body in self.requests if each.endswith(path)]

    def kubeconfig(self, token: str = "", **extra: Any) -> str:
        """The path of a file for a user with this token; extra: of the context."""
        path = self.folder / f"kubeconfig-{token or 'none'}"
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(self.account / "ca.crt")}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "me", "user": {"token": token} if token else {}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", **extra}}],
                }
            )
        )
        return str(path)

    # requests

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers every request."""
        body: Any = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, body))
        if self.silent:
            await asyncio.sleep(3600)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        known = {ACCOUNT_TOKEN: {"username": ACCOUNT}, **self.users}
        user = known.get(token if scheme.lower() == "bearer" else f"{scheme} {token}")
        if user is None:
            return _status(401, "Unauthorized")
        name = user["username"]
        if any(name == who and request.path.endswith(end) for who, end in self.forbidden):
            return _status(403, f'User "{name}" cannot do that')
        parts = request.path.strip("/").split("/")
        if parts == ["apis", "authentication.k8s.io", "v1", "tokenreviews"]:
            return self._token_review(body)
        if parts == ["apis", "authorization.k8s.io", "v1", "subjectaccessreviews"]:
            while body["spec"]["user"] == self.held:
                await asyncio.sleep(0.01)
            return self._access_review(body)
        if parts == ["api", "v1", "pods"]:
            node = request.query["fieldSelector"].removeprefix("spec.nodeName=")
            return self._list([each for each in self.pods if each["spec"]["nodeName"] == node], request)
        if parts[:3] == ["api", "v1", "namespaces"] and parts[4] == "pods":
            return await self._pods(request, parts[3], *parts[5:])
        return _status(404, "the server could not find the requested resource")

    async def _pods(
        self, request: web.Request, namespace: str, name: str = "", subresource: str = ""
    ) -> web.StreamResponse:
        there = [each for each in self.pods if each["metadata"]["namespace"] == namespace]
        if not name:
            labels = dict(pair.split("=") for pair in request.query.get("labelSelector", "").split(",") if pair)
            return self._list([each for each in there if each["metadata"]["labels"].items() >= labels.items()], request)
        found = [each for each in there if each["metadata"]["name"] == name]
        if not found:
            return _status(404, f'pods "{name}" not found')
        return await self._forward(request, name) if subresource == "portforward" else _json(found[0])

    def _token_review(self, review: Any) -> web.Response:
        user = self.users.get(review["spec"]["token"])
        wanted = review["spec"].get("audiences")
        audiences = (user or {}).get("audiences", ["https://kubernetes.default.svc"])
        if user is None or (wanted and not set(wanted) & set(audiences)):
            return _json({**review, "status": {"authenticated": False, "error": "invalid bearer token"}})
        who = {name: value for name, value in user.items() if name != "audiences"}
        status = {"authenticated": True, "user": who, **({"audiences": wanted} if wanted else {})}
        return _json({**review, "status": status})

    def _access_review(self, review: Any) -> web.Response:
        asked = review["spec"]["resourceAttributes"]
        what = (asked["verb"], asked["resource"], asked["subresource"])
        allowed = what == ("create", "pods", "exec")
        allowed &= (review["spec"]["user"], asked["namespace"], asked["name"]) in self.execs
        return _json({**review, "status": {"allowed": allowed}})

    def _list(self, items: list[dict[str, Any]], request: web.Request) -> web.Response:
        if "PartialObjectMetadataList" in request.headers.get("Accept", ""):
            partial = [
                {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": each["metadata"]}
                for each in items
            ]
            kind = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList"}
            return web.json_response({**kind, "metadata": {}, "items": partial})
        limit, start = int(request.query.get("limit", "500")), int(request.query.get("continue", "0"))
        page = items[start : start + limit]
        metadata = {"continue": str(start + limit)} if start + limit < len(items) else {}
        plain = [{name: value for name, value in each.items() if name != "kind"} for each in page]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": plain})

    async def _forward(self, request: web.Request, pod_name: str) -> web.WebSocketResponse:
        port = int(request.query["ports"])
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        for channel in (0, 1):
            await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection(*self.addresses[pod_name, port])
        except (OSError, KeyError):
            await socket.send_bytes(b"\x01connection refused")
            await socket.close()
            return socket

        async def back() -> None:
            while data := await reader.read(1 << 16):
                await socket.send_bytes(b"\0" + data)
            await socket.close()

        task = asyncio.create_task(back())
        with contextlib.suppress(ConnectionError):
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    writer.write(message.data[1:])
                    await writer.drain()
        task.cancel()
        writer.close()
        return socket


def _json(resource: dict[str, Any]) -> web.Response:
    kubernetes_validate.validate(copy.deepcopy(resource), SCHEMAS, strict=True)
    return web.json_response(resource, status=200 if resource["kind"] == "Pod" else 201)


def _status(code: int, message: str) -> web.Response:
    text = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": code}
    return web.Response(status=code, text=json.dumps(text), content_type="application/json")


@contextlib.contextmanager
def api_server(folder: Path, port: int = 0) -> Iterator[ApiServer]:
    """A running server."""
    folder.mkdir(parents=True, exist_ok=True)
    server = ApiServer(folder)
    authority = Authority("kubernetes")
    pair = authority.issue(ip="127.0.0.1")
    server.account.mkdir()
    (server.account / "token").write_text(ACCOUNT_TOKEN)
    (server.account / "ca.crt").write_bytes(authority.certificate)
    for name, data in (("server.pem", pair.certificate), ("server.key", pair.key)):
        (folder / name).write_bytes(data)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        application = web.Application(client_max_size=1 << 24)
        application.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=context, reuse_address=True)
        await site.start()
        server.port = runner.addresses[0][1]
        started.set()
        await stop.wait()
        await site.stop()
        for connection in list(runner.server.connections if runner.server is not None else ()):
            if connection.transport is not None:
                connection.transport.abort()
        for _ in range(5):  # the ends of what was aborted come one after the other
            await asyncio.sleep(0)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="API server")
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)
