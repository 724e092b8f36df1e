"""The requests of Dynolog's clients, read as Dynolog reads them. Pure.

Theory of operation
    Dynolog knows five functions, which are the five commands of `dyno`. What it does not know (another function, none,
    or no JSON object) it answers with nothing: it closes the connection. Arguments that are missing or have a wrong
    type it answers with {"status": "failed"} or {"status": "failed with exception = ..."}; for `dcgmProfPause` a wrong
    type ends Dynolog itself, which has no answer of its own to copy.

    `pids` and `config` are required, `job_id` is 0 and `process_limit` 1000 unless given, as in Dynolog. Its numbers
    may be fractions, of which it takes the whole part; numbers that do not fit are wrong here and wrap around there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kinetod.dynolog_door.json_frames import BadFrame

MAX_PIDS = 4096
_DEFAULT_PROCESS_LIMIT = 1000
_MAX_NUMBER = 2**64 - 1  # dyno's --job-id is an unsigned 64-bit number
_ALL_PIDS = frozenset({0})  # older versions of dyno


class WrongArgument(ValueError):
    """An argument that Dynolog answers with a failure; the text says which, and what it should be."""


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

    process_limit: how many may be traced; negative for any number, as Dynolog's conversion to size_t makes of it.
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
