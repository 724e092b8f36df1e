"""The requests of Dynolog's clients, read as Dynolog reads them. Pure.

Theory of operation
    Dynolog knows five functions, which are the five commands of `dyno`. It does not answer anything else (another
    function, none, or no JSON object): it closes the connection. It answers missing arguments and wrong types with
    {"status": "failed"} or {"status": "failed with exception = ..."}; for `dcgmProfPause` a wrong type crashes Dynolog,
    so there is no answer to copy.

    `pids` and `config` are required, `job_id` is 0 and `process_limit` 1000 unless given, as in Dynolog. Its numbers
    may be fractions, which are truncated; numbers that do not fit are errors here and wrap around there.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_PIDS = 4096
_DEFAULT_PROCESS_LIMIT = 1000
_MAX_NUMBER = 2**64 - 1  # dyno's --job-id is an unsigned 64-bit number
_ALL_PIDS = frozenset({0})  # older versions of dyno
PREFIX = struct.Struct("=i")
MAX_REQUEST_BYTES = 64 << 10  # dyno's have 300 to 600 bytes; 4096 pids fit


class WrongArgument(ValueError):
    """An argument that Dynolog answers with a failure; the message names it and its expected type."""


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """`getStatus`: dyno status."""


@dataclass(frozen=True, slots=True)
class VersionAsked:
    """`getVersion`: dyno version."""


@dataclass(frozen=True, slots=True)
class DcgmPauseAsked:
    """`dcgmProfPause`: dyno dcgm-pause."""


@dataclass(frozen=True, slots=True)
class DcgmResumeAsked:
    """`dcgmProfResume`: dyno dcgm-resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAsked:
    """`setKinetOnDemandRequest`: dyno gputrace. pids: empty for every process of the job.

    process_limit: how many may be traced; negative means no limit, because of Dynolog's conversion to size_t.
    """

    config: str
    pids: frozenset[int]
    job_id: int
    process_limit: int


Asked = StatusAsked | VersionAsked | DcgmPauseAsked | DcgmResumeAsked | TraceAsked
STATUS, VERSION = "getStatus", "getVersion"
TRACE = "setKinetOnDemandRequest"
PAUSE, RESUME = "dcgmProfPause", "dcgmProfResume"
FUNCTIONS = (STATUS, VERSION, TRACE, PAUSE, RESUME)


def function_of(request: Mapping[str, Any]) -> str:
    """The function that a request names. Raises BadFrame for one that Dynolog does not know."""
    name = request.get("fn")
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise BadFrame(f"an unknown function {name!r:.80}" if "fn" in request else "no member fn")
    return name


def arguments_of(function: str, request: Mapping[str, Any]) -> Asked:
    """The request as a value. Raises WrongArgument."""
    if function == STATUS:
        return StatusAsked()
    if function == VERSION:
        return VersionAsked()
    if function == RESUME:
        return DcgmResumeAsked()
    if function == PAUSE:
        _number(request, "duration_s")
        return DcgmPauseAsked()
    return _trace(request)


def _trace(request: Mapping[str, Any]) -> TraceAsked:
    for name in ("config", "pids"):
        if name not in request:
            raise WrongArgument(f"{name} is missing")
    config, listed = request["config"], request["pids"]
    if not isinstance(config, str):
        raise WrongArgument(f"config must be a string, got {config!r:.80}")
    if not isinstance(listed, list):
        raise WrongArgument(f"pids must be a list of numbers, got {listed!r:.80}")
    if len(listed) > MAX_PIDS:
        raise WrongArgument(f"pids has {len(listed)} numbers; at most {MAX_PIDS} are allowed")
    pids = frozenset(_whole(f"pids[{index}]", value) for index, value in enumerate(listed))
    return TraceAsked(
        config=config,
        pids=frozenset() if pids == _ALL_PIDS else pids,
        job_id=_number(request, "job_id", 0),
        process_limit=_number(request, "process_limit", _DEFAULT_PROCESS_LIMIT),
    )


def _number(request: Mapping[str, Any], name: str, default: int | None = None) -> int:
    if name not in request:
        if default is None:
            raise WrongArgument(f"{name} is missing")
        return default
    return _whole(name, request[name])


def _whole(name: str, value: object) -> int:
    if isinstance(value, (int, float)):  # and bool: in Dynolog's library true is 1
        if abs(value) <= _MAX_NUMBER:
            return int(value)
        raise WrongArgument(f"{name} is out of range")
    raise WrongArgument(f"{name} must be a number, got {value!r:.80}")


# Dynolog's frames: an int32 in the byte order of the host, then as many bytes of JSON. Pure.
# rpc/SimpleJsonServer.cpp of facebookincubator/dynolog at c3a231a is the source of this format and of `requests`.
class BadFrame(ValueError):
    """The input is not a request; the message says why. Dynolog does not answer it."""


def body_size(prefix: bytes) -> int:
    """The length of the JSON that follows. Raises BadFrame."""
    (size,) = PREFIX.unpack(prefix)
    if not 0 < size <= MAX_REQUEST_BYTES:
        raise BadFrame(f"a length of {size} bytes; a request has 1 to {MAX_REQUEST_BYTES}")
    return int(size)


def read_object(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a frame. Raises BadFrame."""
    try:
        found = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError and JSONDecodeError too
        raise BadFrame(f"not JSON: {exc}") from exc
    if not isinstance(found, dict) or not found:
        raise BadFrame("not a JSON object with a member")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def frame(answer: Mapping[str, Any]) -> bytes:
    """Encodes an answer: compact, members sorted by name, as in Dynolog."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    body = text.encode("utf-8", "replace")
    return PREFIX.pack(len(body)) + body
