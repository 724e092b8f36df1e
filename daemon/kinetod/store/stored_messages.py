"""Messages that the index of captures has as JSON.

A list of captures has hundreds, which are the same when it is asked for again: reading them takes some 50 times as long
as copying them. So the last ones are kept, as long as they are short.
"""

from functools import lru_cache

from google.protobuf import json_format
from google.protobuf.message import Message
from kineto_protos.v1 import profiler_pb2 as pb

MAX_KEPT = 1024
MAX_TEXT = 16 << 10  # characters of one that is kept


def read_into(message: Message, text: str) -> None:
    """Sets what the text says in an empty message; unknown fields are left out. Raises json_format.ParseError."""
    name = message.DESCRIPTOR.name
    message.CopyFrom(_kept(name, text) if len(text) <= MAX_TEXT else _read(name, text))


def _read(name: str, text: str) -> Message:
    found: Message = json_format.Parse(text, getattr(pb, name)(), ignore_unknown_fields=True)
    return found


@lru_cache(MAX_KEPT)
def _kept(name: str, text: str) -> Message:
    """Nobody changes it."""
    return _read(name, text)
