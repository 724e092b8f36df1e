"""Changes of bytes, of JSON values and of texts, all of them from one random number generator."""

import random
from typing import Any

NUMBERS = (
    0, 1, -1, 7, 255, 4096, 65535, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**63,
    2**64,
)  # fmt: skip
TRICKS = (
    "", ".", "..", "/", "../", "../../outside/secret", "../" * 40 + "etc/passwd", "/etc/passwd", "//etc//passwd",
    "..\\..\\secret", "%2e%2e%2fsecret", "a\0b", "\0", "a\nb", "\r\n", "\x1b[31m", "\x7f", "link", "link/secret",
    "~root", "$HOME", "`id`", "$(id)", "; rm", "' OR 1=1 --", '"', "*", "?", "[", "(" * 60, "(a+)+$", "\\", "{}",
    "%s%n",
    "é", "\u202e", "\ufeff", "\U0001f525", "e\u0301" * 50, "A" * 255, "A" * 256, "A" * 5000, "/".join(["a"] * 500),
    "-1", "0", "9" * 30, "1e999", "nan", "null", "true", "file:///etc/passwd", "s3://x/y", "con", "captures", "trash",
    "index.sqlite", "20200101-000000-000-000000", "/proc/self/environ", "/dev/zero", "unix:/tmp/x",
)  # fmt: skip


def text(rng: random.Random) -> str:
    """A text that somebody may have forgotten."""
    made = rng.choice(TRICKS)
    if rng.random() < 0.2:
        made = rng.choice(TRICKS)[:100] + made
    if rng.random() < 0.1:
        made += chr(rng.choice((0, 9, 10, 0x7F, 0x80, 0x2028, 0xFFFF, 0x10FFFF, rng.randrange(0xD800))))
    return made


def number(rng: random.Random) -> int:
    """An integer, mostly one at the edge of something."""
    made = rng.choice(NUMBERS) if rng.random() < 0.8 else rng.getrandbits(rng.randrange(1, 64))
    return made + rng.choice((0, 0, 1, -1))


def damaged(data: bytes, rng: random.Random, most: int = 8) -> bytes:
    """The data with up to `most` changes: bits, bytes, words, cuts, copies, texts."""
    work = bytearray(data)
    for _ in range(rng.randrange(1, most + 1)):
        at, length, to = rng.randrange(len(work) + 1), rng.randrange(64), rng.randrange(len(work) + 1)
        action = rng.randrange(7)
        if action == 0 and at < len(work):
            work[at] ^= 1 << rng.randrange(8)
        elif action == 1 and at < len(work):
            work[at] = rng.randrange(256)
        elif action == 2:
            size = rng.choice((1, 2, 4, 8))
            work[at : at + size] = (number(rng) & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif action == 3:
            del work[at : at + length]
        elif action == 4:
            work[to:to] = work[at : at + length]
        elif action == 5 and rng.random() < 0.2:
            del work[at:]
        elif action == 6:
            work[at:at] = text(rng).encode("utf-8", "replace")[:300]
    return bytes(work)


def value(rng: random.Random, depth: int = 2) -> Any:
    """Any JSON value."""
    kind = rng.randrange(9 if depth else 6)
    if kind == 0:
        return text(rng)
    if kind == 1:
        return number(rng)
    if kind == 2:
        return rng.choice((True, False, None))
    if kind == 3:
        return rng.choice((0.5, -0.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf")))
    if kind in (4, 5):
        return rng.choice(([], {}, "", 0))
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {text(rng)[:50]: value(rng, depth - 1) for _ in range(rng.randrange(4))}


def changed(original: Any, rng: random.Random) -> Any:
    """A JSON value in which one thing, at any depth, is something else, missing, or more."""
    if isinstance(original, dict) and original and rng.random() < 0.85:
        key = rng.choice(sorted(original))
        action = rng.random()
        if action < 0.07:
            return {name: each for name, each in original.items() if name != key}
        if action < 0.12:
            return {**original, text(rng)[:80]: value(rng)}
        return {**original, key: changed(original[key], rng)}
    if isinstance(original, list) and original and rng.random() < 0.85:
        at = rng.randrange(len(original))
        action = rng.random()
        if action < 0.1:
            return original[:at] + original[at + 1 :]
        if action < 0.2:
            return original + [original[at]] * rng.choice((1, 2, 100))
        return [*original[:at], changed(original[at], rng), *original[at + 1 :]]
    if isinstance(original, bool) or original is None or rng.random() < 0.3:
        return value(rng)
    if isinstance(original, int):
        return number(rng) if rng.random() < 0.7 else original + rng.choice((-1, 1, 1 << 20))
    return text(rng) if isinstance(original, str) else value(rng)
