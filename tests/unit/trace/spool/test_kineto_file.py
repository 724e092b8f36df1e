"""What was asked of a process's own libkineto, as it is kept beside the file."""

import json
from pathlib import Path

import pytest
from kineto_trace.errors import SpoolError
from kineto_trace.spool.kineto_file import FOLDER, OnDemandRequest, has_request, kineto_file

ASKED = OnDemandRequest(trace_id=42, folder="/tmp", name="kinetod-c1_7.json", sent_ns=5, until_ns=9)


def test_a_request_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert not has_request(tmp_path)
    ASKED.write(tmp_path)
    assert has_request(tmp_path)
    assert OnDemandRequest.read(tmp_path) == ASKED
    assert kineto_file(tmp_path).parent == tmp_path / "raw" / "kineto"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"trace_id": -1, "folder": "/tmp", "name": "x"}),
        json.dumps({"trace_id": 1, "folder": "/tmp", "name": "../x"}),
        json.dumps({"trace_id": 1, "folder": 7, "name": "x"}),
        json.dumps({"trace_id": 1, "folder": "/tmp", "name": "x", "other": 1}),
    ],
)
def test_what_is_no_request_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "request.json").write_text(text)
    with pytest.raises(SpoolError):
        OnDemandRequest.read(tmp_path)
