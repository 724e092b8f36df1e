"""The kinetod-writer service as systemd starts it: another user, two capabilities, the socket passed. Needs root."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.service import attach_service
from support.service.attach_service import CALLER_UID, SERVICE_UID, Service

__all__ = ["CALLER_UID", "CAPABILITIES", "SERVICE_UID", "policy_text", "running"]
CAPABILITIES = ("setuid", "setgid")  # as in the unit; a test compares
_READS_PYTHON = "dac_read_search"  # Python may lie in /root
MODULE = ("-m", "kinetod.trace_writing")


def policy_text(*roots: Path, users: Sequence[int | str] = ("1000-64000",), more: str = "") -> str:
    """A policy for these folders and users."""
    names = json.dumps([str(root) for root in roots])
    return f"callers = [{CALLER_UID}]\nroots = {names}\nusers = {json.dumps(list(users))}\n{more}"


@contextlib.contextmanager
def running(*roots: Path, **how: str) -> Iterator[Service]:
    """A started service that writes below these folders."""
    needed = (*CAPABILITIES, *(() if _everybody_may_run_python() else (_READS_PYTHON,)))
    with attach_service.running(
        name="writer", module=MODULE, capabilities=needed, policy=policy_text(*roots, **how)
    ) as service:
        yield service


def _everybody_may_run_python() -> bool:
    path = Path(sys.executable).resolve()
    return all(part.stat().st_mode & 0o005 == 0o005 for part in (path, *path.parents))
