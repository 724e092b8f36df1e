"""Messages of the index: read once, and independent of each other."""

from typing import Any

import pytest
from google.protobuf import json_format
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.store import stored_messages
from kinetod.store.stored_messages import MAX_TEXT, read_into


def text(reason: str) -> str:
    return json_format.MessageToJson(pb.Target(reason=reason))


def test_a_message_is_read_once_and_each_copy_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    real = json_format.Parse

    def counted(*args: Any, **more: Any) -> Any:
        read.append(args[0])
        return real(*args, **more)

    monkeypatch.setattr(json_format, "Parse", counted)
    first, second = pb.Target(), pb.Target()
    for each in (first, second):
        read_into(each, text("kept once"))
    first.reason = "changed"
    assert (second.reason, len(read)) == ("kept once", 1)


def test_long_texts_are_not_kept() -> None:
    before = stored_messages._kept.cache_info().currsize
    target = pb.Target()
    read_into(target, text("x" * MAX_TEXT))
    assert (len(target.reason), stored_messages._kept.cache_info().currsize) == (MAX_TEXT, before)


def test_fields_of_other_versions_are_left_out() -> None:
    target = pb.Target()
    read_into(target, '{"reason": "known", "ofTomorrow": 3}')
    assert target == pb.Target(reason="known")
