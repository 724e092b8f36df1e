"""An S3-compatible server of our own, and a way to it that breaks."""

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
BUCKET = "traces"
_PART = re.compile(rb"PUT /\S*partNumber=(\d+)")
_PIECE = 1 << 16


def credentials() -> dict[str, str]:
    """Variables with the credentials, for the environment of a daemon."""
    return {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass
class Proxy:
    """A proxy that counts what it lets through, and cuts connections when it is told to."""

    target: tuple[str, int]
    parts: list[int] = field(default_factory=list)  # numbers of the parts that were begun
    cut_after: int = 0  # bytes to the server, then the connection is cut, if there are cuts left
    cuts: int = 0
    blocked: bool = False
    _sockets: set[socket.socket] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.blocked:
                    client.close()
                    continue
                server = socket.create_connection(self.target)
                self._sockets |= {client, server}
                for source, sink, up in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if up:
                    self.parts += map(int, _PART.findall(data))
                    passed += len(data)
                    if self.cuts > 0 and passed > self.cut_after:
                        self.cuts -= 1
                        break
                sink.sendall(data)
        for each in (source, sink):
            self._sockets.discard(each)
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        """Ends it and its connections."""
        self._listener.close()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@dataclass
class S3:
    """The server with one bucket, seen directly."""

    port: int
    fs: Any

    def names(self) -> list[str]:
        """Keys of all objects in the bucket."""
        return sorted(path.removeprefix(f"{BUCKET}/") for path in self.fs.find(BUCKET))

    def unfinished(self) -> list[str]:
        """Keys of multipart uploads that were begun and not completed."""
        return [each["Key"] for each in self.fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])]

    def content(self, name: str) -> bytes:
        """Content of one object."""
        data: bytes = self.fs.cat_file(f"{BUCKET}/{name}")
        return data


@contextlib.contextmanager
def running_s3() -> Iterator[S3]:
    """A server in this process."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        fs = fsspec.filesystem(
            "s3",
            key="testing",
            secret=SECRET,
            endpoint_url=f"http://127.0.0.1:{port}",
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        fs.mkdir(BUCKET)
        try:
            yield S3(port, fs)
        finally:
            fs.rm(BUCKET, recursive=True)  # servers of one process have one memory
    finally:
        server.stop()


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """A way to the server that the test can break."""
    proxy = Proxy(("127.0.0.1", port))
    try:
        yield proxy
    finally:
        proxy.close()
