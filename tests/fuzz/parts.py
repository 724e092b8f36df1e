"""Inputs of several parts: a mark between them, which survives what a fuzzer does to bytes better than lengths do."""

import json
import random

from fuzz import mutate

MARK = b"\n\xfe\xfdPART\xfc\n"


def joined(*parts: bytes) -> bytes:
    """One input."""
    return MARK.join(parts)


def parted(data: bytes, count: int) -> list[bytes]:
    """Exactly so many parts; those that are missing are empty, the rest of them stays in the last one."""
    found = data.split(MARK, count - 1)
    return found + [b""] * (count - len(found))


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON document in which something is another value; what is none is damaged."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate.damaged(data, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        document = mutate.changed(document, rng)
    return json.dumps(document).encode("utf-8", "replace")
