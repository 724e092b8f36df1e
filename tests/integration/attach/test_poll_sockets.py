"""Sockets for libkineto's polls in containers' network namespaces, made by the attach helper for whoever may ask it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from kinetod.attach_helper.helper_client import HelperService
from kinetod.kineto_ipc.network_namespaces import NamespacesSeen, inhabited, own_namespace
from kinetod.kineto_ipc.poll_door import PollDoor
from support.machine.namespaces import polled_namespaces
from support.service import attach_service
from support.service.attach_service import CALLER_UID, OWNER_UID, POLICY, Service, as_caller, unprivileged
from support.service.daemon import child_environ
from support.waiting import soon

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
CLIENT = """
import sys
from support.peers.libkineto import Libkineto
print(flush=True)
for line in sys.stdin:
    print(repr(Libkineto().poll()), flush=True)
"""
ASK = """
import asyncio, sys
from pathlib import Path
from kinetod.attach_helper.helper_client import HelperService
served = set(map(int, sys.argv[2:]))
seen = asyncio.run(HelperService(Path(sys.argv[1])).poll_sockets(served))
print(None if seen is None else sorted(seen.opened))
"""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with polled_namespaces():
        yield


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with attach_service.running() as started:
        yield started


@dataclass(frozen=True, slots=True)
class Container:
    """A process in a network namespace of its own that looks for a daemon there."""

    process: "subprocess.Popen[str]"
    namespace: int

    def poll(self) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def others(self) -> set[int]:
        """The namespaces of other tests, which must be left alone."""
        return set(inhabited(own_namespace())) - {self.namespace}


@contextlib.contextmanager
def container(uid: int, variables: Mapping[str, str] = {"KINETO_USE_DAEMON": "1"}) -> Iterator[Container]:
    process = subprocess.Popen(
        ["unshare", "--net", *(unprivileged(uid, "dac_read_search") if uid else []), sys.executable, "-c", CLIENT],
        env=child_environ(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield Container(process, Path(f"/proc/{process.pid}/ns/net").stat().st_ino)
    process.communicate()


class OnlyThis:
    """The helper, asked for one namespace."""

    def __init__(self, service: Service, wanted: Container) -> None:
        self._helper = HelperService(service.socket)
        self._wanted = wanted

    async def poll_sockets(self, served: object) -> NamespacesSeen | None:
        known = self._wanted.others() | ({self._wanted.namespace} & set(served))  # type: ignore[call-overload]
        return await self._helper.poll_sockets(known)


def test_polls_of_another_users_container_are_answered_by_a_socket_of_the_helper(service: Service) -> None:
    async def run() -> None:
        with container(OWNER_UID) as wanted:
            door = PollDoor(namespaces=OnlyThis(service, wanted), name=f"\0{os.getpid()}".encode(), look_s=0.2)
            await door.start()
            await soon(lambda: wanted.namespace in door.state().namespaces, "the namespace is served")
            assert await asyncio.to_thread(wanted.poll) == "''"
            (found,) = await soon(door.processes.all, "the process is known")
            assert (found.key.pid, found.uid) == (wanted.process.pid, OWNER_UID)
        await soon(lambda: wanted.namespace not in door.state().namespaces, "the namespace is left alone")
        await door.stop()

    asyncio.run(run())


def test_a_user_without_rights_gets_the_socket_and_nobody_else_does(service: Service) -> None:
    with container(OWNER_UID) as wanted:
        served = map(str, wanted.others())
        done = as_caller(CALLER_UID, ASK, str(service.socket), *served)
        assert done.stdout.strip() == str([wanted.namespace]), done.stderr
        refused = as_caller(OWNER_UID, ASK, str(service.socket), *served)
        assert refused.stdout.strip() == "None"
        assert "is not allowed to use the attach helper" in refused.stderr


def test_a_namespace_is_not_entered_for_a_process_that_the_policy_forbids(service: Service) -> None:
    async def looked(wanted: Container) -> NamespacesSeen | None:
        return await HelperService(service.socket).poll_sockets(wanted.others())

    with container(0) as of_root:
        seen = asyncio.run(looked(of_root))
        assert seen is not None and of_root.namespace not in seen.inhabited and not seen.opened
    with container(OWNER_UID) as denied:
        service.policy.write_text(f"{POLICY}denied_users = [{OWNER_UID}]\n")
        try:
            seen = asyncio.run(looked(denied))
        finally:
            service.policy.write_text(POLICY)
        assert seen is not None and denied.namespace not in seen.inhabited and not seen.opened
