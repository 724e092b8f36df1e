"""A capture into stores of several kinds, without a daemon."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from kineto_trace.errors import FileError
from kineto_trace.store import upload_manifest
from kinetod.uploads.upload_job import (
    LocalFile,
    Notes,
    RemoteCapture,
    Throttle,
    UploadJob,
    part_bytes,
    sink_for,
    upload_capture,
)
from kinetod.uploads.worker_protocol import BLOCK_BYTES, PART_BYTES, LocalDamage, RemoteDamage

CONTENT = bytes(range(256)) * 4096 * 5  # 5 MiB: two blocks
NAME = "7-70/trace.json.gz"


def record(content: bytes) -> tuple[int, str]:
    return len(content), hashlib.sha256(content).hexdigest()


class Place:
    """A folder in some store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, root = fsspec.core.url_to_fs(url)
        self.remote = RemoteCapture(self.fs, root, sleep=lambda _: None)
        self.sink: Any = sink_for(url.partition("://")[0], self.fs, Throttle(0).share(""))

    def names(self) -> list[str]:
        return sorted(path.removeprefix(self.remote.root + "/") for path in self.fs.find(self.remote.root))


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place("memory://bucket/h/c1" if request.param == "memory" else f"file://{tmp_path}/remote/h/c1")
    yield made
    if made.fs.exists(made.remote.root):
        made.fs.rm(made.remote.root, recursive=True)


def make_job(folder: Path, url: str, content: bytes = CONTENT, damaged: Mapping[str, str] | None = None) -> UploadJob:
    target = folder / "targets" / "7-70"
    target.mkdir(parents=True, exist_ok=True)
    (target / "trace.json.gz").write_bytes(content)
    (target / "target.json").write_bytes(b"{}")
    (target / ".trace.tmp").write_bytes(b"half")
    known = {NAME: record(content)}
    return UploadJob(folder=folder, url=url, capture={"id": "c1"}, known=known, damaged=damaged or {})


def upload(job: UploadJob, place: Place, progress: Callable[[int], None] = lambda _: None) -> tuple[str, int]:
    return upload_capture(job, place.sink, place.remote, progress)


def test_everything_is_there_and_the_manifest_says_what(place: Place, tmp_path: Path) -> None:
    digest, size = upload(make_job(tmp_path / "c1", place.url), place)
    assert size == len(CONTENT) + 2
    assert place.names() == ["7-70/target.json", "7-70/trace.json.gz", "manifest.json"]
    found = place.remote.manifest(digest)
    assert found.capture == {"id": "c1"}
    assert (found.files[NAME].size_bytes, found.files[NAME].sha256) == record(CONTENT)
    blocks = [place.remote.block(NAME, found.files[NAME], number) for number in range(2)]
    assert [len(block) for block in blocks] == [BLOCK_BYTES, len(CONTENT) - BLOCK_BYTES]
    assert b"".join(blocks) == CONTENT


def test_a_large_file_goes_in_one_piece_where_nothing_better_exists(place: Place, tmp_path: Path) -> None:
    content = b"x" * (PART_BYTES + 1)
    digest, _ = upload(make_job(tmp_path / "c1", place.url, content), place)
    stored = place.remote.manifest(digest).files[NAME]
    assert (stored.size_bytes, stored.sha256) == record(content)
    place.remote.verify(NAME, stored)


def test_a_damaged_local_file_is_found_and_can_be_left_out(place: Place, tmp_path: Path) -> None:
    job = make_job(tmp_path / "c1", place.url)
    (job.folder / "targets" / NAME).write_bytes(b"y" + CONTENT[1:])
    with pytest.raises(LocalDamage, match="has the SHA-256") as caught:
        upload(job, place)
    assert caught.value.path == NAME
    assert place.names() == ["7-70/target.json"]
    digest, _ = upload(make_job(tmp_path / "c1", place.url, damaged={NAME: "bad"}), place)
    assert place.names() == ["7-70/target.json", "manifest.json"]
    assert place.remote.manifest(digest).damaged == {NAME: "bad"}


def test_a_missing_local_file_is_damage(place: Place, tmp_path: Path) -> None:
    job = make_job(tmp_path / "c1", place.url)
    (job.folder / "targets" / NAME).unlink()
    with pytest.raises(LocalDamage, match=r"trace\.json\.gz: is missing"):
        upload(job, place)
    assert "manifest.json" not in place.names()


def test_what_was_verified_is_not_sent_again(place: Place, tmp_path: Path) -> None:
    job = make_job(tmp_path / "c1", place.url)
    put, sent = place.sink.put, list[str]()

    def failing(source: LocalFile, *rest: Any) -> str:
        sent.append(source.name)
        if source.name == NAME and len(sent) < 3:
            raise ConnectionResetError
        return str(put(source, *rest))

    place.sink.put = failing
    with pytest.raises(ConnectionResetError):
        upload(job, place)
    assert "manifest.json" not in place.names()
    upload(job, place)
    assert sent == ["7-70/target.json", NAME, NAME]


def test_notes_of_another_url_do_not_count(tmp_path: Path) -> None:
    Notes(tmp_path, "file:///a").note("f", "upload_id", "1")
    assert Notes(tmp_path, "file:///a").get("f", "upload_id") == "1"
    assert Notes(tmp_path, "file:///b").get("f", "upload_id") is None
    (tmp_path / "upload.json").write_bytes(b"{")
    assert Notes(tmp_path, "file:///a").get("f", "upload_id") is None


def test_a_part_file_is_gone_on_with(tmp_path: Path) -> None:
    place = Place(f"file://{tmp_path}/remote")
    content = b"a" * PART_BYTES + b"b" * 100
    job = make_job(tmp_path / "c1", place.url, content)
    part = tmp_path / "remote" / (NAME + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"a" * PART_BYTES + b"wrong")
    written = list[int]()
    place.sink._throttle.take = lambda size, _alive: written.append(size)
    upload(job, place)
    assert written == [2, 100]  # target.json, and the last part only
    assert (tmp_path / "remote" / NAME).read_bytes() == content
    assert not part.exists()


def test_damage_in_the_store_is_found(place: Place, tmp_path: Path) -> None:
    digest, _ = upload(make_job(tmp_path / "c1", place.url), place)
    stored = place.remote.manifest(digest).files[NAME]
    place.fs.pipe_file(place.remote.path(NAME), CONTENT[:-1] + b"!")
    place.remote.block(NAME, stored, 0)
    with pytest.raises(RemoteDamage, match="differs from what was uploaded, from byte 4194304 on"):
        place.remote.block(NAME, stored, 1)
    with pytest.raises(RemoteDamage, match="differs from what was uploaded"):
        place.remote.verify(NAME, stored)
    place.fs.pipe_file(place.remote.path(NAME), b"short")
    with pytest.raises(RemoteDamage, match="has 5 bytes instead of"):
        place.remote.verify(NAME, stored)
    place.fs.rm(place.remote.path(NAME))
    with pytest.raises(RemoteDamage, match="does not exist"):
        place.remote.verify(NAME, stored)
    with pytest.raises(RemoteDamage, match="has the SHA-256"):
        place.remote.manifest("0" * 64)
    place.remote.remove()
    assert place.names() == []


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", json.dumps({"version": 2, "block_bytes": 1}).encode()])
def test_a_manifest_that_is_none_is_damage(data: bytes, place: Place) -> None:
    with pytest.raises(FileError, match="the manifest"):
        upload_manifest.from_bytes(data)
    place.fs.makedirs(place.remote.root, exist_ok=True)
    place.fs.pipe_file(place.remote.path("manifest.json"), data)
    with pytest.raises(RemoteDamage, match="the manifest"):
        place.remote.manifest()


def test_parts_are_whole_blocks_and_never_too_many() -> None:
    for size in (0, 1, PART_BYTES, 10**12, 5 * 10**12):
        assert part_bytes(size) % BLOCK_BYTES == 0
        assert -(-size // part_bytes(size)) <= 10_000


def test_a_file_has_the_tag_that_s3_would_give_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content, tag in ((b"abc", "900150983cd24fb0d6963f7d28e17f72"), (b"a" * (PART_BYTES + 1), None)):
        path.write_bytes(content)
        source = LocalFile(path, "f")
        parts = list(source.parts())
        digests = b"".join(part.md5 for part in parts)
        assert source.etag() == (tag or hashlib.md5(digests).hexdigest() + "-2")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "f").symlink_to(tmp_path / "secret")
    with pytest.raises(LocalDamage, match="cannot be read"):
        LocalFile(tmp_path / "f", "f")
