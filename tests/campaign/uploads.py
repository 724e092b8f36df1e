"""Uploads through kills and cut connections: nothing may be lost, nothing partial may pass for whole. Prints figures.

    python tests/campaign/uploads.py [ROUNDS]

In each round, some captures of random sizes are in the store of a new daemon that keeps no local copies. The daemon
is killed with SIGKILL at random moments, while a proxy before the S3 server cuts connections after random amounts.
After each kill every manifest in the bucket must describe whole objects, and every capture must be whole on one side
at least. At the end each capture is fetched through the daemon and compared.
"""

import hashlib
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.store.capture_store import Store
from support.peers.s3 import BUCKET, S3, Proxy, credentials, proxy_to, running_s3
from support.service.daemon import Daemon, running_daemon
from support.service.kept import FILE, put_capture
from support.waiting import until

SIZES = (100, 300_000, 5_000_000, 17_000_000, 40_000_000)
KILLS = 6
CUTS = 8
LONGEST_LIFE_S = 4.0
UPLOADED_S = 120.0


@dataclass
class Figures:
    """Figures of all rounds."""

    kills: int = 0
    cuts: int = 0
    captures: int = 0
    parts_needed: int = 0
    parts_sent: int = 0
    seconds: float = 0.0


def contents(rng: random.Random) -> dict[str, bytes]:
    """Contents of a round's captures, by id."""
    return {f"c{number}": rng.randbytes(rng.choice(SIZES)) for number in range(1, 6)}


def environ(proxy: Proxy, number: int) -> dict[str, str]:
    """The settings of the round's daemon."""
    return {
        **credentials(),
        "KINETOD_UPLOAD_URL": f"s3://{BUCKET}/{number}",
        "KINETOD_UPLOAD_ENDPOINT": f"http://127.0.0.1:{proxy.port}",
        "KINETOD_UPLOAD_RETRY_PAUSE": "200ms",
        "KINETOD_STORE_KEEP_LOCAL": "false",
        "KINETOD_STORE_MAX_AGE": "0",
        "KINETOD_STORE_MAX_ENTRY_AGE": "0",
        "KINETOD_ACCESS_REQUESTS_PER_SECOND": "10000",
    }


def check_bucket(s3: S3, number: int, expected: dict[str, bytes]) -> set[str]:
    """Checks the captures whose manifest is in the bucket; they must be whole. Returns them."""
    whole = set()
    for name in s3.names():
        prefix, _, capture_id, *rest = name.split("/")
        if prefix != str(number) or rest != ["manifest.json"]:
            continue
        for path, file in json.loads(s3.content(name))["files"].items():
            data = s3.content(f"{name.removesuffix('manifest.json')}{path}")
            assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size_bytes"], file["sha256"]), path
            assert data == expected[capture_id], capture_id
        whole.add(capture_id)
    return whole


def check_sides(s3: S3, daemon: Daemon, number: int, expected: dict[str, bytes]) -> None:
    """Checks that every capture is whole in the bucket or here."""
    whole = check_bucket(s3, number, expected)
    for capture_id, content in expected.items():
        if capture_id not in whole:
            (path,) = (daemon.state_dir / "captures" / capture_id).rglob(FILE)
            assert path.read_bytes() == content, capture_id


def await_uploads(daemon: Daemon, expected: dict[str, bytes]) -> None:
    """Waits until each capture is uploaded and its local copy is gone."""
    stub = daemon.stub()

    def done() -> bool:
        found = stub.ListCaptures(pb.ListCapturesRequest(), timeout=10).captures
        ready = [each for each in found if each.upload.state == pb.UPLOAD_STATE_UPLOADED and each.local_bytes == 0]
        return len(ready) == len(expected)

    until(done, "everything is uploaded", UPLOADED_S, state=daemon.log)
    for capture_id, content in expected.items():
        chunks = stub.FetchTrace(pb.FetchTraceRequest(capture_id=capture_id), timeout=60)
        assert b"".join(chunk.data for chunk in chunks) == content, capture_id


def run_round(s3: S3, rng: random.Random, number: int, figures: Figures) -> None:
    """Runs one daemon through all its restarts."""
    expected = contents(rng)
    with tempfile.TemporaryDirectory() as folder, proxy_to(s3.port) as proxy:
        store = Store(Path(folder))
        for position, content in enumerate(expected.values(), 1):
            put_capture(store, position, content)
        store.close()
        with running_daemon(environ=environ(proxy, number), state_dir=Path(folder)) as daemon:
            for _ in range(KILLS):
                proxy.cut_after, proxy.cuts = rng.randrange(1000, 20_000_000), rng.randrange(CUTS)
                cuts = proxy.cuts
                threading.Event().wait(rng.uniform(0, LONGEST_LIFE_S))
                daemon.kill()
                figures.kills += 1
                figures.cuts += cuts - proxy.cuts
                check_sides(s3, daemon, number, expected)
                daemon.start()
            proxy.cuts = 0
            await_uploads(daemon, expected)
        figures.parts_sent += len(proxy.parts)
        figures.parts_needed += sum(-(-len(each) // (16 << 20)) for each in expected.values() if len(each) > 16 << 20)
        figures.captures += len(expected)
    assert check_bucket(s3, number, expected) == set(expected)
    assert s3.unfinished() == []
    for name in s3.names():
        s3.fs.rm(f"{BUCKET}/{name}")


def main() -> int:
    """Runs the campaign. Raises AssertionError at the first loss."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    figures = Figures()
    began = time.monotonic()
    with running_s3() as s3:
        for number in range(rounds):
            run_round(s3, random.Random(number), number, figures)
            figures.seconds = time.monotonic() - began
            print(f"round {number + 1} of {rounds}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
