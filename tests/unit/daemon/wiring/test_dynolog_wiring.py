"""What `kinetoctl doctor` says of the door for Dynolog's clients, and to whom."""

import asyncio
from typing import Any, cast

from kinetod.attach.attach_types import Finding, Status
from kinetod.config.addresses import ListenAddress
from kinetod.dynolog_door.door_server import DynologServer
from kinetod.dynolog_door.log_files import LogFiles
from kinetod.permissions.role_policy import Caller
from kinetod.wiring.dynolog_wiring import DynologDoor
from support.service.callers import ROOT, caller

LOGS = Finding("dynolog_files", Status.OK, "the writer service writes traces below /scratch")


class Files:
    """Files of clients. asked: whether the daemon serves all users, each time that somebody has asked."""

    def __init__(self, *told: Finding) -> None:
        self._told = told
        self.asked: list[bool] = []

    async def findings(self, *, everybody: bool) -> list[Finding]:
        self.asked.append(everybody)
        return list(self._told)


class Server:
    """A door that is open, or closed because of a process."""

    address = ListenAddress(host="localhost", port=1778)

    def __init__(self, problem: str = "", holder: str = "") -> None:
        self.problem, self._holder = problem, holder
        self.listening_at = [] if problem else ["127.0.0.1:1778", "[::1]:1778"]

    async def holder(self) -> str:
        return self._holder


def found(server: Any, who: Caller = ROOT, files: Files | None = None) -> list[Finding]:
    door = DynologDoor(cast("LogFiles", files or Files()), cast("DynologServer | None", server), everybody=True)
    return asyncio.run(door.findings(who))


def test_an_open_door_is_named_with_its_addresses_and_none_is_not_shown() -> None:
    (only,) = found(Server())
    assert (only.name, only.status) == ("dynolog_door", Status.OK)
    assert only.detail == "`dyno` is served at 127.0.0.1:1778, [::1]:1778"
    assert found(None) == []


def test_what_is_known_of_the_files_follows_and_without_a_door_nobody_asks() -> None:
    files = Files(LOGS)
    assert found(Server(), files=files)[1:] == [LOGS]
    assert found(None, files=files) == []
    assert files.asked == [True]


def test_who_has_the_port_is_told_to_those_who_may_see_all_processes() -> None:
    server = Server("localhost:1778 is taken by process 77 (dynolog)", "process 77 (dynolog)")
    (only,) = found(server)
    assert only.detail == "`dyno` is not served: localhost:1778 is taken by process 77 (dynolog)"
    (only,) = found(server, caller(1000))
    assert only.detail == "`dyno` is not served: localhost:1778 is taken by another process"
    (only,) = found(Server("cannot listen at localhost:1778: Permission denied"), caller(1000))
    assert only.detail == "`dyno` is not served: cannot listen at localhost:1778"
