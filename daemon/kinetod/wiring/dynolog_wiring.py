"""Builds the servers for Dynolog's clients and for libkineto's polls, if the settings enable them."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.access.call_gate import Authorizer, CallTracker
from kinetod.access.callers import Callers
from kinetod.access.peers import Peer
from kinetod.attach.attach_types import Finding, Status
from kinetod.attach_helper.helper_client import HelperService
from kinetod.attach_helper.helper_folders import HelperTraceFolders
from kinetod.base.errors import KinetodError
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.captures.manager import CaptureManager, no_such_capture
from kinetod.config.settings import Config, Settings, serves_everybody, socket_mode
from kinetod.dynolog_door.door_server import ClientLimits, DynologServer
from kinetod.dynolog_door.door_service import DynologService, ProcessMatcher
from kinetod.dynolog_door.log_files import LogFiles
from kinetod.kineto_files.direct_folders import DirectTraceFolders
from kinetod.kineto_ipc.network_namespaces import NamespaceOpener, OwnRights
from kinetod.kineto_ipc.poll_door import PollDoor
from kinetod.kineto_ipc.poller_registry import PollingProcesses
from kinetod.permissions.role_policy import Action, Caller, sees_all
from kinetod.selection.process_registry import Registry
from kinetod.store.capture_store import Store
from kinetod.wiring.access_wiring import AccessParts

CHECK_NAME = "dynolog_door"


@dataclass(frozen=True, slots=True)
class DynologDoor:
    """The server and the files that its clients requested. everybody: whether all users may be served."""

    files: LogFiles
    server: DynologServer | None = None
    service: DynologService | None = None
    everybody: bool = False

    def capture_ended(self, capture: pb.Capture) -> None:
        """Writes the files of a capture that has ended."""
        self.files.capture_ended(capture)

    async def start(self, captures: CaptureManager) -> None:
        """Starts the server, and writes files that the previous daemon had promised."""
        for capture_id in await asyncio.to_thread(self.files.load):
            try:
                capture = await captures.get(capture_id)
            except KinetodError:
                self.files.drop(capture_id)
            else:
                if capture.status != pb.CAPTURE_STATUS_RUNNING:
                    self.files.capture_ended(capture)
        if self.server is not None and self.service is not None:
            await self.server.start(self.service.answer)

    async def findings(self, caller: Caller) -> list[Finding]:
        """Findings of `kinetoctl doctor` about the server. The process that has the port is named only to callers who
        may see all processes.
        """
        if self.server is None:
            return []
        return [await self._served(self.server, caller), *await self.files.findings(everybody=self.everybody)]

    async def _served(self, server: DynologServer, caller: Caller) -> Finding:
        if not server.problem:
            return Finding(CHECK_NAME, Status.OK, f"`dyno` is served at {', '.join(server.listening_at)}")
        holder = await server.holder()
        if not sees_all(caller, Action.SEE_PROCESS):
            holder = holder and "another process"
        taken = f"{server.address} is taken by {holder}" if holder else f"cannot listen at {server.address}"
        advice = "stop the other process (systemctl stop dynolog), or set dynolog.rpc to another address"
        return Finding(CHECK_NAME, Status.PROBLEM, f"`dyno` is not served: {taken}", advice)


def make_dynolog_door(
    settings: Settings,
    access: AccessParts,
    registry: Registry,
    store: Store,
    captures: CaptureManager,
    stack: contextlib.AsyncExitStack,
    *,
    looks: FairSlots,
    healthy: Callable[[], bool],
    polling: PollingProcesses | None = None,
) -> DynologDoor:
    """Builds the server; nobody can connect yet. polling: processes whose libkineto polls, if this daemon answers;
    looks: slots for inspecting processes.
    """
    config = settings.current
    files = LogFiles(settings, access.audit, store.target_dir)
    stack.push_async_callback(files.stop)
    if config.dynolog_rpc is None:
        return DynologDoor(files)
    everybody, own_uid = serves_everybody(config), os.geteuid()

    def is_admin(peer: Peer) -> bool:
        return peer.uid in (0, own_uid)

    server = DynologServer(
        config.dynolog_rpc,
        ClientLimits(is_admin),
        socket_mode=socket_mode(config),
        lets_in=lambda peer: everybody or peer.uid is None or is_admin(peer),
    )
    callers = Callers(settings, server.peer, own_uid=own_uid)
    call_tracker = CallTracker(callers, access.calls, access.rate, access.audit, hold=server.hold)
    stack.callback(call_tracker.close)
    gate = Authorizer(
        callers, access.rate, access.audit, call_tracker, resource_of=captures.resource, no_such=no_such_capture
    )
    service = DynologService(
        settings, gate, call_tracker, captures, ProcessMatcher(registry, polling), files, looks, healthy=healthy
    )
    stack.push_async_callback(server.stop)
    return DynologDoor(files, server, service, everybody)


async def start_poll_door(
    config: Config, helper: NamespaceOpener | None, stack: contextlib.AsyncExitStack
) -> PollDoor | None:
    """Starts the server for polls, closed with the stack; None if dynolog.ipc is off. helper: the attach helper, if
    any.
    """
    if not config.dynolog_ipc:
        return None
    opener = helper or (OwnRights() if os.geteuid() == 0 else None)
    door = PollDoor(config.dynolog_socket_dirs, namespaces=opener if config.dynolog_containers else None)
    stack.push_async_callback(door.stop)
    await door.start()
    return door


def make_recorder(
    door: PollDoor | None, helper: HelperService | None, stack: contextlib.AsyncExitStack
) -> KinetoRecorder | None:
    """Creates the common state of captures by libkineto, stopped with the stack; None if no process polls."""
    if door is None:
        return None
    recorder = KinetoRecorder(door.processes, HelperTraceFolders(helper) if helper else DirectTraceFolders())
    stack.push_async_callback(recorder.stop)
    return recorder
