"""Finds an earlier capture of many hosts by its id."""

from collections.abc import Sequence

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.upload_manifest import FLEET_LABEL

from kinetoctl.client.fleet.broadcast import ask
from kinetoctl.client.fleet.host_client import HostClient
from kinetoctl.client.fleet.host_run import Fleet, HostRun, stored_clock
from kinetoctl.client.hosts.host_targets import Place
from kinetoctl.errors import NotFound

LIMIT = 1000  # captures of one host that are parts of one capture


async def parts_of(client: HostClient, capture_id: str) -> list[pb.Capture]:
    """The parts of the capture on one host; empty if it has none."""
    found = await client.captures({FLEET_LABEL: capture_id}, limit=LIMIT)
    try:
        return found or [await client.capture(capture_id)]
    except NotFound:
        return []


def find_fleet(places: Sequence[Place], capture_id: str, *, timeout_s: float) -> Fleet:
    """The parts of the capture on these hosts: captures with its label, or the one capture with this id.

    A host that does not answer becomes a member with its error. Raises NotFound if no host has a part.
    """

    async def parts(client: HostClient, _place: Place) -> list[pb.Capture]:
        return await parts_of(client, capture_id)

    members = []
    for place, captures, error in ask(places, parts, timeout_s=timeout_s):
        if error is not None:
            members.append(HostRun(place, error=error))
        members += [HostRun(place, each, clock=stored_clock(each), started=True) for each in captures or ()]
    if not any(member.capture for member in members):
        raise next((m.error for m in members if m.error), NotFound(f"no host has a capture {capture_id}"))
    return Fleet(id=capture_id, members=members)
