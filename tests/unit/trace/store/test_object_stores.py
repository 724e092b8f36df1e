"""Stores that answer with redirects, and proxies that refuse, at the library that really speaks to them."""

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from kineto_trace.store.object_stores import open_store, store_error
from support.peers.s3 import SECRET, credentials

DATA = b"what somebody traced"


@contextlib.contextmanager
def server(said: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Says this to every request. Yields its port, and the beginnings of what it got."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        got.append(connection.recv(65536))
                        connection.sendall(said + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1]), got
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)


def failure(endpoint: str, *, write: bool) -> str:
    fs, path = open_store("s3://bucket/folder", endpoint=endpoint)
    with pytest.raises(Exception) as caught:
        fs.pipe_file(f"{path}/file", DATA) if write else fs.cat_file(f"{path}/file")
    return store_error(caught.value)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_store_that_redirects_is_not_followed(status: int, write: bool) -> None:
    with server(b"HTTP/1.1 200 OK") as (elsewhere, got):
        target = f"http://127.0.0.1:{elsewhere}/latest/meta-data?token=abc"
        with server(b"HTTP/1.1 %d Elsewhere\r\nLocation: %s" % (status, target.encode())) as (port, _):
            text = failure(f"http://127.0.0.1:{port}", write=write)
    assert got == []
    assert text.endswith(
        f"the store answered {status}, a redirect to http://127.0.0.1: redirects are not followed; configure the "
        "address of the store itself"
    )


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nor_is_azures(status: int, write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    with server(b"HTTP/1.1 200 OK") as (elsewhere, got):
        target = f"http://127.0.0.1:{elsewhere}/latest/meta-data?token=abc"
        with server(b"HTTP/1.1 %d Elsewhere\r\nLocation: %s" % (status, target.encode())) as (port, _):
            place = f"BlobEndpoint=http://127.0.0.1:{port}/account"
            key = f"AccountName=account;AccountKey={base64.b64encode(SECRET.encode()).decode()}"
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{key};{place}")
            fs, path = open_store("az://bucket/object")
            type(fs).clear_instance_cache()  # the next one has another address
            with pytest.raises(OSError, match=f"{status}, a redirect to http://127.0.0.1: redirects are not"):
                fs.pipe_file(path, DATA) if write else fs.cat_file(path)
    assert got == []


def test_nor_is_one_that_redirects_to_a_file() -> None:
    with server(b"HTTP/1.1 302 Elsewhere\r\nLocation: file:///etc/passwd") as (port, _):
        assert "a redirect to file://: redirects are not followed" in failure(f"http://127.0.0.1:{port}", write=False)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password_is_named_with_what_to_do(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(b"HTTP/1.1 407 Proxy Authentication Required") as (port, got):
        monkeypatch.setenv(f"{scheme}_proxy", f"http://user:{SECRET}@127.0.0.1:{port}")
        text = failure(f"{scheme}://store.invalid", write=True)
    assert got
    assert text.endswith(
        "; the proxy requires a user name and password: put them in https_proxy, or add the store to no_proxy"
    )
