"""What others put beside uploaded traces: a manifest, clocks of hosts, a target's description."""

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kineto_trace.collectives.rank_clocks import read_clocks
from kineto_trace.errors import FileError, SpoolError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.store.upload_manifest import Manifest, Stored, from_bytes, is_below

from fuzz.parts import changed_json

_folder = Path(tempfile.mkdtemp(prefix="fuzz-manifest-"))


def play(data: bytes) -> None:
    try:
        found = from_bytes(data)
    except FileError:
        pass
    else:
        for path in (*found.files, *found.damaged):
            assert is_below(path) and (_folder / path).resolve().is_relative_to(_folder)
        json.loads(found.to_bytes())
    (_folder / "clocks.json").write_bytes(data)
    with contextlib.suppress(FileError):
        read_clocks(_folder / "clocks.json")
    with contextlib.suppress(SpoolError):
        TargetInfo.from_json(TargetInfo.from_json(data).to_json())


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Other values."""
    return changed_json(data, rng)


def seeds() -> Iterator[bytes]:
    """One of each."""
    stored = Stored(size_bytes=7, sha256="ab" * 32, blocks=("cd" * 32,))
    capture = {"id": "c", "spec": {"labels": {"a": "b"}}, "targets": [{"process": {"rank": 3}, "files": []}]}
    yield Manifest(capture=capture, files={"host-1/trace.json.gz": stored}, damaged={"x": "gone"}).to_bytes()
    yield json.dumps({"0": {"offset_ns": 1500, "uncertainty_ns": 200}, "1": -5}).encode()
    info = TargetInfo(capture_id="c", host="h", pid=1, process_name="p", threads={7: "t"}, iterations=[[1, 2]])
    yield info.to_json().encode()
