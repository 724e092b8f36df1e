"""Damaged traces through the loaders, for a long time: `fuzz_loaders.py [--minutes N] [--seed N] [FILE…]`.

Real traces (those given, else those recorded on a GPU) are changed: bytes, cuts, copies, tokens that JSON minds,
compressed data cut or damaged. Each must load, or give FileError; what loaded must be written as valid JSON, load
again, and be written again to the same bytes. The native reader runs beside it under sanitizers, if the compiler has
them. What fails is kept in build/fuzz.
"""

import argparse
import io
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from isal import igzip

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_trace.errors import FileError
from kineto_trace.load.chrome import load_chrome
from support.chrome_files import written
from support.native import ROOT, build, has_sanitizer

KEPT = ROOT / "build" / "fuzz"
SANITIZER = "address,undefined"
TOKENS = (
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\\u", b"\\ud800", b"NaN", b"N/A", b"nan", b"-inf",
    b"1e999", b"1e-99", b"-0.0", b"0.1", b"18446744073709551616", b"-9223372036854775809", b'"ts":1e18,', b'"dur":-5,',
    b'"args":{', b'"ph":"X",', b'"ph":"i",', b'"cat":"kernel",', b"null", b"\x01", b"\xff", b'{"ph":', b"[memory]",
    b'"External id":', b'"tid":"x",', b'"pid":-1,', b'"traceEvents":[', b'],"traceName":', b'"Python parent id":0,',
)  # fmt: skip


class Failure(Exception):
    """A loader did what it must not."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The data with a few changes."""
    text = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 5, 20))):
        at, length, to = rng.randrange(len(text) + 1), rng.randrange(200), rng.randrange(len(text) + 1)
        action = rng.randrange(6)
        if action == 0 and at < len(text):
            text[at] = rng.randrange(256)
        elif action == 1:
            del text[at : at + length]
        elif action == 2:
            text[to:to] = text[at : at + length]
        elif action == 3 and rng.random() < 0.2:
            del text[at:]
        else:
            text[at:at] = rng.choice(TOKENS)
    if rng.random() < 0.15:
        packed = bytearray(igzip.compress(bytes(text), 1))
        if rng.random() < 0.5:
            del packed[rng.randrange(len(packed)) :]
        else:
            packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
        return bytes(packed)
    return bytes(text)


def check(data: bytes) -> bool:
    """Loads, writes, loads and writes. Whether it was a trace; raises Failure."""
    try:
        trace = load_chrome(io.BytesIO(data))
    except FileError:
        return False
    once = written(trace)
    try:
        document = json.loads(once)
    except ValueError as exc:
        raise Failure(f"what was written is no JSON: {exc}") from exc
    count = sum(len(table) for table in trace.tables.values())
    if len(document["traceEvents"]) != count:
        raise Failure(f"{count} events, {len(document['traceEvents'])} were written")
    try:
        again = load_chrome(io.BytesIO(once))
    except FileError:
        if count:
            raise
        return True
    if again.losses.undecoded or any("mended" in note for note in again.notes):
        raise Failure(f"what was written is damaged: {again.notes}")
    if written(again) != once:
        raise Failure("written again it is something else")
    return True


def cases(originals: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Damaged traces without end."""
    while True:
        data = rng.choice(originals)
        if rng.random() < 0.7:  # a short one: a cut of the events
            first = data.find(b"[", data.find(b'"traceEvents"')) + 1 if rng.random() < 0.5 else 0
            start = rng.randrange(first, len(data))
            data = (data[:first] if first else b"[") + data[start : start + rng.randrange(20_000)]
        yield mutated(data, rng)


def run(originals: Sequence[bytes], *, seed: int, rounds: int | None = None, seconds: float | None = None) -> int:
    """Checks cases until the rounds or the time are over and returns their number. Raises what a bad one raised."""
    rng = random.Random(seed)
    end = None if seconds is None else time.monotonic() + seconds
    done = 0
    for data in cases(originals, rng):
        if done == rounds or (end is not None and time.monotonic() > end):
            break
        try:
            check(data)
        except Exception:
            KEPT.mkdir(parents=True, exist_ok=True)
            path = KEPT / f"loaders-{seed}-{done}.json"
            path.write_bytes(data)
            sys.stderr.write(f"kept: {path}\n")
            raise
        done += 1
    return done


def sanitized(originals: Sequence[bytes], seconds: float, seed: int) -> subprocess.Popen[bytes] | None:
    """The native reader under sanitizers, for about that long."""
    if not has_sanitizer(SANITIZER):
        return None
    codec = ROOT / "daemon" / "native"
    flags = ["-O1", "-g", f"-fsanitize={SANITIZER}", "-fno-sanitize-recover=all", f"-I{codec}"]
    driver = ROOT / "tests" / "unit" / "trace" / "native" / "fuzz_chrome.c"
    program = build("fuzz_chrome", [*sorted(codec.glob("chrome*.c")), driver], flags)
    folder = Path(tempfile.mkdtemp())
    for number, data in enumerate(originals):
        (folder / f"{number}.json").write_bytes(data[:100_000])
    script = 'end=$(($(date +%s) + $2)); seed=$3; while [ $(date +%s) -lt $end ]; do for f in "$4"/*; do '
    script += '"$1" "$f" 2000 $seed >/dev/null || exit 1; seed=$((seed + 1)); done; done'
    return subprocess.Popen(["sh", "-c", script, "sh", str(program), str(int(seconds)), str(seed), str(folder)])


def recordings() -> list[bytes]:
    """Kineto's traces from a GPU."""
    from support.h200 import recording

    names = ("mlp", "graph", "streams")
    return [json.dumps(recording(f"{name}-cupti130001").kineto, indent=1).encode() for name in names]


def main() -> int:
    """Both for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("files", nargs="*", type=Path)
    words = parser.parse_args()
    originals = [path.read_bytes() for path in words.files] or recordings()
    native = sanitized(originals, words.minutes * 60, words.seed)
    try:
        done = run(originals, seed=words.seed, seconds=words.minutes * 60)
    except Exception:
        traceback.print_exc()
        return 1
    status = native.wait() if native else 0
    print(f"seed {words.seed}: {done} damaged traces; native reader: {'ok' if status == 0 else 'failed'}")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
