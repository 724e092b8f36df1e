"""JSON of others that is too deep, too large or no Unicode: refused by the error that is documented."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz.targets.cluster import Answering
from fuzz.targets.decoder_answer import CONVERSION
from kineto_trace.errors import FileError, SpoolError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import _read_source_json
from kineto_trace.store import upload_manifest
from kinetod.attach_helper import diagnosis, messages
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.target.conversion import checked
from kinetod.kubernetes.api_server import ApiError, NodePods

HEAD = messages.encode(messages.Connected()).partition(b"{")[0]
DEEP = b"[" * 100_000
NO_UNICODE = b'{"items":[{"metadata":{"uid":"\xc5x","namespace":"","name":""}}]}'
TARGET = '{"capture_id": "c", "host": "h", "pid": 1, "process_name": "p", '


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (upload_manifest.from_bytes, FileError),
        (TargetInfo.from_json, SpoolError),
        (diagnosis.decode, ValueError),
        (lambda data: messages.answer(HEAD + data), messages.BadMessage),
    ],
)
def test_what_is_too_deep_is_refused(read: Callable[[bytes], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        read(DEEP)


def test_raw_records_with_a_description_that_is_too_deep_are_lost(tmp_path: Path) -> None:
    (tmp_path / "source.json").write_bytes(DEEP)
    with pytest.raises(SpoolError, match="the raw data of this source is lost"):
        _read_source_json(tmp_path / "source.json")


@pytest.mark.parametrize("said", [NO_UNICODE, b'{"x":' + DEEP])
def test_an_api_server_that_says_something_else_is_an_api_error(said: bytes) -> None:
    server = Answering()
    server.said = said
    with pytest.raises(ApiError, match="sent an invalid answer to"):
        asyncio.run(NodePods(server, "node").current())


def test_a_message_of_the_helper_that_is_no_unicode_is_a_bad_one() -> None:
    with pytest.raises(messages.BadMessage, match="cannot be decoded"):
        messages.answer(HEAD + b'{"type":"refused","code":"\xc5x","reason":""}')


@pytest.mark.parametrize("count", [float("inf"), float("nan"), -1, True, "5", 1 << 64])
def test_a_decoder_counts_in_whole_numbers(tmp_path: Path, count: object) -> None:
    with pytest.raises(DecodeError, match="the decoder's answer is invalid"):
        checked({**CONVERSION, "records_undecoded": count}, tmp_path, ("chrome",), "host", 1)


@pytest.mark.parametrize(
    "wrong",
    ['"labels": {"a": Infinity}', '"command": [1]', '"options": {"x": NaN}', '"iterations": [[1]]',
     '"iterations": [["1", 2]]', '"thread_use": [{"a": 1e999}]', '"rank": 1000000000000000000000'],
)  # fmt: skip
def test_a_description_has_the_types_that_traces_are_written_with(wrong: str) -> None:
    with pytest.raises(SpoolError, match="has a wrong type"):
        TargetInfo.from_json(f"{TARGET}{wrong}}}")
