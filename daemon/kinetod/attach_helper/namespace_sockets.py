"""Sockets for libkineto's polls in other network namespaces, made for a front end that may not enter any.

Theory of operation
    The front end says which namespaces it serves already, and nothing else: which there are is read here, and each is
    entered for a process only that the policy allows. A process of its own enters it, binds the one name and ends. One
    answer brings one descriptor at most.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kinetod.attach.attach_types import AttachCode
from kinetod.attach_helper import messages
from kinetod.attach_helper.denial import Denial
from kinetod.attach_helper.worker_queries import NAMESPACES
from kinetod.kineto_ipc.network_namespaces import open_in
from kinetod.processes.identity import ProcessKey

_MAX_REASON_CHARS = 200


async def open_one(
    asked: messages.OpenPollSocket,
    caller_pid: int,
    ask: Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]],
    check: Callable[[ProcessKey], object],
    proc: Path,
) -> tuple[messages.PollSockets, socket.socket | None]:
    """Opens the first namespace that is not served. ask: a helper process; check: raises Denial. Raises Denial."""
    try:
        own = (proc / str(caller_pid) / "ns/net").stat().st_ino
    except OSError as exc:
        raise Denial(AttachCode.GONE, "the caller's network namespace cannot be read") from exc
    found = (await ask({"do": NAMESPACES, "own": own}))["found"]
    allowed = dict[int, list[ProcessKey]]()
    for namespace, processes in found:
        for pid, start in processes:
            with contextlib.suppress(Denial):
                check(ProcessKey(pid, start))
                allowed.setdefault(namespace, []).append(ProcessKey(pid, start))
    inhabited = tuple(allowed)
    for namespace in allowed.keys() - set(asked.served):
        try:
            sock = await asyncio.to_thread(open_in, namespace, allowed[namespace])
        except OSError as exc:
            problem = str(exc)[:_MAX_REASON_CHARS]
            return messages.PollSockets(inhabited=inhabited, namespace=namespace, problem=problem), None
        return messages.PollSockets(inhabited=inhabited, namespace=namespace, problem=""), sock
    return messages.PollSockets(inhabited=inhabited, namespace=0, problem=""), None
