"""Receivers of profiles, for tests: OTLP over gRPC by the service of opentelemetry-proto, OTLP and Pyroscope over HTTP.

What they get is read by OpenTelemetry's own schema, and by pprof.
"""

import contextlib
import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as pb
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2_grpc as services

from support.peers.certificates import Authority
from support.peers.receiver import serving


@dataclass
class Push:
    """One request. path: of the URL, or of the gRPC method."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def profiles(self) -> pb.ExportProfilesServiceRequest:
        """The request by OpenTelemetry's schema."""
        return pb.ExportProfilesServiceRequest.FromString(self.body)


@dataclass
class ProfileReceiver:
    """What came, and what is answered: statuses of HTTP or gRPC, one for each request; none: success."""

    address: str = ""
    pushes: list[Push] = field(default_factory=list)
    statuses: list[Any] = field(default_factory=list)
    response: pb.ExportProfilesServiceResponse = field(default_factory=pb.ExportProfilesServiceResponse)


@contextlib.contextmanager
def http_receiver(form: str) -> Iterator[ProfileReceiver]:
    """A receiver at {form}+http://…"""
    receiver = ProfileReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            receiver.pushes.append(Push(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            status = receiver.statuses.pop(0) if receiver.statuses else 200
            text = receiver.response.SerializeToString() if status == 200 else b"because\n"
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.address = f"{form}+http://127.0.0.1:{server.server_address[1]}"
    with serving(server):
        yield receiver


@contextlib.contextmanager
def grpc_receiver(authority: Authority | None = None) -> Iterator[ProfileReceiver]:
    """OpenTelemetry's own service. authority: it uses TLS, with a certificate for localhost."""
    receiver = ProfileReceiver()

    class Service(services.ProfilesServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            headers = {str(key): str(value) for key, value in context.invocation_metadata()}
            receiver.pushes.append(Push("Export", headers, request.SerializeToString()))
            if receiver.statuses and (status := receiver.statuses.pop(0)) is not grpc.StatusCode.OK:
                context.abort(status, "because")
            return receiver.response

    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add: Any = services.add_ProfilesServiceServicer_to_server  # untyped
    add(Service(), server)
    if authority is None:
        receiver.address = f"otlp+grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        pair = authority.issue("localhost", dns="localhost")
        credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
        receiver.address = f"otlp+grpcs://localhost:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def secret_file(path: Path, text: str) -> Path:
    """A file that only its owner may read, as the settings of secrets want it."""
    path.write_text(text)
    path.chmod(0o600)
    return path
