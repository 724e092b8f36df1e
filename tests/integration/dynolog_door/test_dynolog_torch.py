"""Clients of Dynolog trace real training processes that were started without any preparation."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.dynolog import client
from support.dynolog.door import noted_file, trace_request
from support.service.daemon import Daemon

pytestmark = pytest.mark.torch


def categories(path: Path) -> set[str]:
    events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return {event.get("cat", "") for event in events}


def test_iterations_of_an_unprepared_process_are_traced_as_ray_asks_for_them(
    daemon: Daemon, door: str, training: int, place: Path
) -> None:
    config = (
        f"ACTIVITIES_LOG_FILE={place}/gputrace_127.0.0.1_20261127.json\nPROFILE_START_ITERATION=0\n"
        "PROFILE_START_ITERATION_ROUNDUP=1\nACTIVITIES_ITERATIONS=3\nPROFILE_REPORT_INPUT_SHAPES=true\n"
        "PROFILE_WITH_STACK=false\nPROFILE_WITH_FLOPS=true\nPROFILE_WITH_MODULES=false"
    )
    told = client.asked(door, {**trace_request(), "config": config, "pids": [training], "process_limit": 1})
    assert told["processesMatched"] == [training], told
    (path,) = [place / f"gputrace_127.0.0.1_20261127_{training}.json"]
    assert noted_file(daemon, path)["decision"] == "written"
    assert "cpu_op" in categories(path)


def test_a_timed_trace_has_stacks_and_is_compressed_if_its_name_says_so(
    daemon: Daemon, door: str, training: int, place: Path
) -> None:
    told = client.asked(door, trace_request(place / "t.json.gz", pids=[training]))
    assert told["processesMatched"] == [training], told
    path = place / f"t_{training}.json.gz"
    assert noted_file(daemon, path)["decision"] == "written"
    assert path.read_bytes()[:2] == b"\x1f\x8b"
