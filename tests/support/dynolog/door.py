"""A daemon with the door open for Dynolog's clients, and what its tests ask again and again."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.service.daemon import Daemon, running_daemon
from support.waiting import until

TRACE_FUNCTION = "setKinetOnDemandRequest"
_SERVED = re.compile(r"Dynolog clients are served at (\S+)")


@contextlib.contextmanager
def open_door(
    *options: str,
    uid: int | None = None,
    rpc: str = "127.0.0.1:0",
    environ: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[Daemon]:
    """A daemon of root, or of `uid`, with these settings, by the second part of their names in the section dynolog.

    Every user may enter its folder, which has an audit log and is the place for traces unless log_roots says another.
    """
    variables = {f"KINETOD_DYNOLOG_{name.upper()}": value for name, value in {"rpc": rpc, **settings}.items()}
    with running_daemon(*options, uid=uid, environ={**variables, **(environ or {})}) as daemon:
        daemon.root.chmod(0o755)
        yield daemon


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder of its own that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="dynolog-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def door_of(daemon: Daemon) -> str:
    """The address of the door that was opened last."""
    found: list[str] = until(lambda: _SERVED.findall(daemon.log()), "the door is open")
    return found[-1]


def trace_request(
    log_file: str | Path | None = None,
    *,
    pids: Sequence[int] = (),
    duration_ms: int = 200,
    more: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """A request as dyno makes it, for a timed trace."""
    text = f"PROFILE_START_TIME=0\nACTIVITIES_DURATION_MSECS={duration_ms}\nPROFILE_WITH_STACK=true\n{more}"
    config = text if log_file is None else f"ACTIVITIES_LOG_FILE={log_file}\n{text}"
    return {"fn": TRACE_FUNCTION, "config": config, "pids": list(pids), "job_id": 0, "process_limit": 3, **fields}


def audited(daemon: Daemon, call: str) -> list[dict[str, Any]]:
    """The lines of the audit log about a call, which go to the daemon's log here."""
    lines = re.findall(r"NOTICE kinetod\.audit: (\{.*\})", daemon.log())
    return [found for found in map(json.loads, lines) if found["call"] == call]


def noted_file(daemon: Daemon, path: Path | str) -> dict[str, Any]:
    """Waits for the line of the audit log about a file that a client asked for."""

    def find() -> dict[str, Any] | None:
        return next((line for line in audited(daemon, "(trace file)") if line["path"] == str(path)), None)

    return until(find, f"the audit log has {path}", state=daemon.log)
