"""Captures into an S3-compatible server, through interruptions: nothing is lost, nothing half is taken for whole."""

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.store.capture_store import Store
from kinetod.uploads.worker_protocol import PART_BYTES
from support.peers.s3 import BUCKET, S3, SECRET, Proxy, credentials, proxy_to, running_s3
from support.service.daemon import Daemon, error_of, running_daemon
from support.service.kept import FILE, put_capture
from support.waiting import scaled, until

LARGE = random.Random(1).randbytes(2 * PART_BYTES + 1000)  # three parts
SMALL = b"a small trace"
KEY = "prefix/gpu-7/c{number}"


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with running_s3() as running:
        yield running


@pytest.fixture
def s3(server: S3) -> S3:
    for name in server.names():
        server.fs.rm(f"{BUCKET}/{name}")
    return server


@pytest.fixture
def proxy(s3: S3) -> Iterator[Proxy]:
    with proxy_to(s3.port) as made:
        yield made


@contextmanager
def uploading(proxy: Proxy, *contents: bytes, **settings: str) -> Iterator[Daemon]:
    """A daemon that finds these captures, c1, c2, …, in its store."""
    environ = {
        **credentials(),
        "KINETOD_UPLOAD_URL": f"s3://{BUCKET}/prefix",
        "KINETOD_UPLOAD_ENDPOINT": f"http://127.0.0.1:{proxy.port}",
        "KINETOD_UPLOAD_RETRY_PAUSE": "100ms",
        "KINETOD_ACCESS_REQUESTS_PER_SECOND": "10000",  # we ask until it is so
        "KINETOD_STORE_MAX_AGE": "0",
        "KINETOD_STORE_MAX_ENTRY_AGE": "0",
        **{f"KINETOD_{name.upper()}": value for name, value in settings.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for number, content in enumerate(contents, 1):
            put_capture(store, number, content)
        store.close()
        with running_daemon(environ=environ, state_dir=Path(folder)) as daemon:
            yield daemon


def capture(daemon: Daemon, number: int = 1) -> pb.Capture:
    found: pb.Capture = daemon.stub().GetCapture(pb.GetCaptureRequest(id=f"c{number}"), timeout=scaled(10))
    return found


def state(daemon: Daemon, number: int = 1) -> int:
    return int(capture(daemon, number).upload.state)


def await_uploaded(daemon: Daemon, number: int = 1) -> pb.Capture:
    until(
        lambda: state(daemon, number) == pb.UPLOAD_STATE_UPLOADED,
        f"c{number} is uploaded",
        state=lambda: f"{capture(daemon, number).upload}\n{daemon.log()}",
    )
    return capture(daemon, number)


def fetched(daemon: Daemon, number: int = 1, offset: int = 0) -> bytes:
    request = pb.FetchTraceRequest(capture_id=f"c{number}", offset=offset)
    return b"".join(chunk.data for chunk in daemon.stub().FetchTrace(request, timeout=30))


def checks(daemon: Daemon, **fields: Any) -> list[str]:
    request = pb.VerifyCaptureRequest(**{"id": "c1", **fields})
    return [each.problem for each in daemon.stub().VerifyCapture(request, timeout=30)]


@pytest.mark.slow
def test_a_capture_is_uploaded_verified_and_fetched_from_there(s3: S3, proxy: Proxy) -> None:
    with uploading(proxy, LARGE, SMALL, store_keep_local="false") as daemon:
        first = await_uploaded(daemon)
        await_uploaded(daemon, 2)
        base = KEY.format(number=1)
        assert s3.names()[:2] == [f"{base}/7-70/{FILE}", f"{base}/manifest.json"]
        manifest = s3.content(f"{base}/manifest.json")
        assert first.upload.manifest_sha256 == hashlib.sha256(manifest).hexdigest()
        file = json.loads(manifest)["files"][f"7-70/{FILE}"]
        assert (file["size_bytes"], file["sha256"]) == (len(LARGE), hashlib.sha256(LARGE).hexdigest())
        assert first.upload.url == f"s3://{BUCKET}/{base}"
        until(lambda: capture(daemon).HasField("local_bytes") and capture(daemon).local_bytes == 0, "it is only there")
        until(lambda: not list((daemon.state_dir / "captures").iterdir()), "the local copies are gone")
        assert fetched(daemon) == LARGE
        assert fetched(daemon, offset=len(LARGE) - 5_000_000) == LARGE[-5_000_000:]
        assert fetched(daemon, 2) == SMALL
        assert checks(daemon) == [""]
        assert SECRET not in daemon.log()


@pytest.mark.slow
def test_cut_connections_lose_nothing(s3: S3, proxy: Proxy) -> None:
    proxy.cut_after, proxy.cuts = PART_BYTES // 2, 4
    with uploading(proxy, LARGE) as daemon:
        await_uploaded(daemon)
    assert proxy.cuts == 0
    assert s3.content(f"{KEY.format(number=1)}/7-70/{FILE}") == LARGE
    assert s3.unfinished() == []


@pytest.mark.slow
def test_a_killed_daemon_goes_on_with_the_missing_parts(s3: S3, proxy: Proxy) -> None:
    with uploading(proxy, LARGE, upload_max_bytes_per_second="8MiB") as daemon:
        until(lambda: 2 in proxy.parts, "the second part is sent", state=daemon.log)
        daemon.kill()
        assert s3.names() == []  # neither a half object nor a manifest
        assert s3.unfinished() == [f"{KEY.format(number=1)}/7-70/{FILE}"]
        daemon.environ["KINETOD_UPLOAD_MAX_BYTES_PER_SECOND"] = "0"
        daemon.start()
        await_uploaded(daemon)
        assert proxy.parts.count(1) == 1
        assert s3.content(f"{KEY.format(number=1)}/7-70/{FILE}") == LARGE
        assert s3.unfinished() == []
        assert fetched(daemon) == LARGE


@pytest.mark.slow
def test_an_unreachable_store_is_shown_and_tried_again(s3: S3, proxy: Proxy) -> None:
    proxy.blocked = True
    with uploading(proxy, SMALL, SMALL, store_max_bytes="1") as daemon:
        until(lambda: state(daemon, 1) == pb.UPLOAD_STATE_RETRYING, "a try has failed", state=daemon.log)
        until(lambda: state(daemon, 2) == pb.UPLOAD_STATE_RETRYING, "a try has failed", state=daemon.log)
        failed = capture(daemon).upload
        assert (failed.failures >= 1, failed.url) == (True, f"s3://{BUCKET}/{KEY.format(number=1)}")
        assert failed.error
        assert fetched(daemon) == SMALL  # retention would remove it, were it uploaded
        tries = capture(daemon, 2).upload.failures
        next((daemon.state_dir / "captures" / "c2").rglob(FILE)).write_bytes(b"A" + SMALL[1:])
        until(lambda: capture(daemon, 2).upload.failures > tries, "a try that had read it has ended", state=daemon.log)
        proxy.blocked = False
        await_uploaded(daemon)
        until(lambda: capture(daemon).local_bytes == 0, "retention has removed the local copy", state=daemon.log)
        assert "local copy of uploaded capture c1 of uid 1000 (4 KiB) was removed" in daemon.log()
        # what was damaged before its upload is marked and left out
        assert await_uploaded(daemon, 2).targets[0].files[0].damage.startswith("has the SHA-256")
        assert [name for name in s3.names() if "/c2/" in name] == [f"{KEY.format(number=2)}/manifest.json"]
        assert error_of(lambda: fetched(daemon, 2))[1] == "FILE_DAMAGED"
        assert SECRET not in daemon.log()


@pytest.mark.slow
def test_damage_is_told_and_the_uploaded_copy_helps(s3: S3, proxy: Proxy) -> None:
    with uploading(proxy, SMALL) as daemon:
        uploaded = await_uploaded(daemon)
        store_file = next((daemon.state_dir / "captures" / "c1").rglob(FILE))
        store_file.write_bytes(b"A" + SMALL[1:])
        code, reason, message = error_of(lambda: fetched(daemon))
        assert (code, reason) == (grpc.StatusCode.DATA_LOSS, "FILE_DAMAGED")
        assert "has the SHA-256" in message
        assert capture(daemon).targets[0].files[0].damage.startswith("has the SHA-256")
        assert fetched(daemon) == SMALL  # from the object store
        store_file.unlink()
        (problem, there) = checks(daemon, uploaded=True)
        assert (problem, there) == ("cannot be read (No such file or directory)", "")
        s3.fs.pipe_file(f"{uploaded.upload.url.removeprefix('s3://')}/7-70/{FILE}", b"B" + SMALL[1:])
        code, reason, message = error_of(lambda: fetched(daemon))
        assert (code, reason) == (grpc.StatusCode.DATA_LOSS, "FILE_DAMAGED")
        assert "differs from what was uploaded" in message
        store_file.write_bytes(SMALL)
        assert checks(daemon)[0] == ""
        assert capture(daemon).targets[0].files[0].damage == ""


@pytest.mark.slow
def test_delete_takes_the_uploaded_copy_along_unless_told_otherwise(s3: S3, proxy: Proxy) -> None:
    with uploading(proxy, SMALL, SMALL, SMALL) as daemon:
        stub = daemon.stub()
        for number in (1, 2, 3):
            await_uploaded(daemon, number)
        stub.PinCapture(pb.PinCaptureRequest(id="c1", pinned=True), timeout=scaled(10))
        code, reason, _ = error_of(lambda: stub.DeleteCapture(pb.DeleteCaptureRequest(id="c1"), timeout=scaled(10)))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CAPTURE_PINNED")
        assert not stub.PinCapture(pb.PinCaptureRequest(id="c1"), timeout=scaled(10)).pinned
        stub.DeleteCapture(pb.DeleteCaptureRequest(id="c1"), timeout=scaled(10))
        stub.DeleteCapture(pb.DeleteCaptureRequest(id="c2", keep_uploaded=True), timeout=scaled(10))
        assert {name.split("/")[2] for name in s3.names()} == {"c2", "c3"}
        proxy.blocked = True
        proxy.close()
        code, reason, _ = error_of(lambda: stub.DeleteCapture(pb.DeleteCaptureRequest(id="c3"), timeout=scaled(60)))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OBJECT_STORE_FAILED")
        left = stub.ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10)).captures
        assert [each.id for each in left] == ["c3"]
