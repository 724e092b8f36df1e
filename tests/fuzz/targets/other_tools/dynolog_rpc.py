"""What a client of Dynolog sends: the frame, the JSON in it, its arguments, the configuration text in these."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kineto_protos.kineto_config import KinetoConfigError
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import KinetodError
from kinetod.captures.request.capture_spec import checked_spec
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config
from kinetod.dynolog_door import door_service
from kinetod.dynolog_door.door_service import (
    PREFIX,
    BadFrame,
    TraceAsked,
    WrongArgument,
    body_size,
    frame,
    limited,
    read_object,
    requested_trace,
)

NOW_NS = 1_790_000_000 * 10**9
CONFIG = Config(listen=(ListenAddress(path=Path("/x")),), agent_socket=Path("/y"), state_dir=Path("/z"))
_TIMED = (
    "ACTIVITIES_LOG_FILE=/tmp/t.json\\nPROFILE_START_TIME=0\\nACTIVITIES_DURATION_MSECS=500\\n"
    "PROFILE_REPORT_INPUT_SHAPES=true\\nPROFILE_WITH_STACK=false\\nPROFILE_WITH_FLOPS=false\\nPROFILE_WITH_MODULES=true"
)
_ITERATED = (
    "ACTIVITIES_LOG_FILE=/tmp/t.pt.trace.json\\nPROFILE_START_ITERATION=0\\nPROFILE_START_ITERATION_ROUNDUP=10\\n"
    "ACTIVITIES_ITERATIONS=3\\nREQUEST_RECORDER=kineto"
)
_MEMORY = "ACTIVITIES_LOG_FILE=s3://b/t.json\\nPROFILE_MEMORY=true\\nPROFILE_MEMORY_DURATION_MSECS=200"


def play(data: bytes) -> None:
    """The rules: only the documented errors; an answer is a frame of JSON; nothing is traced that is not listed."""
    prefix, body = data[: PREFIX.size], data[PREFIX.size :]
    if len(prefix) == PREFIX.size:
        with contextlib.suppress(BadFrame):
            body = body[: body_size(prefix)]
    try:
        request = read_object(body)
        function = door_service.function_of(request)
    except BadFrame as exc:
        assert len(str(exc)) < 1000
        return
    try:
        asked = door_service.arguments_of(function, request)
    except WrongArgument as exc:
        _check_answer(door_service.wrong_argument(function, str(exc)))
        return
    if isinstance(asked, TraceAsked):
        _trace(asked)


def _trace(asked: TraceAsked) -> None:
    matched = limited(((pid, pid % 3 == 0) for pid in asked.pids), asked.process_limit)
    assert asked.process_limit < 0 or len(matched.free) <= asked.process_limit
    assert asked.pids.issuperset(matched.free)
    pids = [pid for pid in matched.free if 0 < pid < 2**31]
    try:
        wanted = requested_trace(asked.config, pids, NOW_NS)
        checked_spec(wanted.spec, CONFIG, NOW_NS)
    except (KinetoConfigError, KinetodError):
        return
    assert os.sep not in (wanted.log_file.stem if wanted.log_file is not None else "")
    capture = pb.Capture(id="x", targets=[pb.Target(pid=pid) for pid in pids])
    _check_answer(door_service.started(door_service.TraceStarted(matched=matched, capture=capture, notes=wanted.notes)))


def _check_answer(answer: door_service.Answer) -> None:
    sent = frame(answer)
    (size,) = PREFIX.unpack(sent[: PREFIX.size])
    assert size == len(sent) - PREFIX.size
    json.loads(sent[PREFIX.size :])


def seeds() -> Iterator[bytes]:
    """As dyno sends them, and some mistakes."""
    for text in (
        '{"fn":"getStatus"}',
        '{"fn":"getVersion"}',
        '{"fn":"dcgmProfResume"}',
        '\n{\n    "fn": "dcgmProfPause",\n    "duration_s": 300\n}',
        '{"fn":"setKinetOnDemandRequest","config":1,"pids":[1.5,true,"x"]}',
        '{"fn":"other"}',
        *(
            f'\n{{\n    "fn": "setKinetOnDemandRequest",\n    "config": "{config}",\n    "job_id": 77,\n'
            f'    "pids": [0,12],\n    "process_limit": 3\n}}'
            for config in (_TIMED, _ITERATED, _MEMORY)
        ),
    ):
        yield PREFIX.pack(len(text)) + text.encode()
    yield PREFIX.pack(-1) + b"[]"
