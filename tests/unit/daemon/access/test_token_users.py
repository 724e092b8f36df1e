"""Callers with a Kubernetes token: who they are, and which pods they may trace."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from kinetod.access.callers import Callers
from kinetod.access.peers import Peer
from kinetod.access.token_users import INTRODUCED_AT_ONCE, MAX_TOKEN_CHARS, KubernetesUsers
from kinetod.base.errors import Exhausted, KinetodError, NotPermitted, Reason
from kinetod.base.fair_slots import fair_share_key
from kinetod.config.addresses import ListenAddress
from kinetod.config.config_sources import access_problems
from kinetod.config.settings import Config, Settings
from kinetod.kubernetes.api_server import ApiServer, NodePods, Reviews
from kinetod.permissions.role_policy import Action, Caller, Resource, Role, Via, may
from support.peers import api_server as fake
from support.waiting import scaled, soon

NAME = "unix-abstract:kinetod-1"
CONFIG = Config(listen=(ListenAddress(path=Path("/x")),), agent_socket=Path("/y"), state_dir=Path("/z"))
PEER = Peer(via=Via.KUBERNETES, address="127.0.0.1")
ADA = {"authorization": [b"Bearer ada-s"]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[fake.ApiServer]:
    with fake.api_server(tmp_path / "cluster") as server:
        server.users["ada-s"] = {"username": "ada"}
        server.pods = [fake.pod(name, uid=f"uid-{name}") for name in ("llama-0", "llama-1", "secret-0")]
        server.pods.append(fake.pod("llama-9", uid="uid-llama-9", node="node-2"))
        server.execs = {("ada", "training", name) for name in ("llama-0", "llama-1", "llama-9")}
        yield server


def who(
    cluster: fake.ApiServer, auth: Any = ADA, action: Action = Action.TRACE, pods: frozenset[str] = frozenset(),
    audiences: tuple[str, ...] = (), deadline_s: float = 20,
) -> Caller:  # fmt: skip
    async def number_of(name: str) -> int:
        return {"ada": 1 << 31}[name]

    async def ask() -> Caller:
        api = ApiServer(("127.0.0.1", cluster.port), cluster.account, deadline_s=deadline_s)
        users = KubernetesUsers(Reviews(api), NodePods(api, "node-1"), number_of=number_of, audiences=lambda: audiences)
        try:
            return await Callers(Settings(CONFIG), {NAME: PEER}.get, users, own_uid=7).caller(NAME, auth, action, pods)
        finally:
            api.close()

    return asyncio.run(ask())


def refused(cluster: fake.ApiServer, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Of a caller who is not known, or of what one who is asks for."""
    try:
        refusal = who(cluster, *arguments, **options).refusal
        assert refusal is not None
    except KinetodError as exc:
        refusal = exc
    return refusal.reason, refusal.message


def test_a_user_of_kubernetes_has_the_role_pods_and_a_number(cluster: fake.ApiServer) -> None:
    found = who(cluster, action=Action.SEE_HOST)
    assert (found.uid, found.user) == (1 << 31, "ada")
    assert (set(found.roles), set(found.pods)) == ({Role.PODS}, set())
    assert (str(found), found.key) == ("the Kubernetes user ada", f"uid {1 << 31}")
    assert cluster.asked("subjectaccessreviews") == []  # nothing of pods is asked


def test_the_pods_of_this_node_that_the_user_may_exec_into_may_be_traced_and_no_others(
    cluster: fake.ApiServer,
) -> None:
    found = who(cluster)
    assert found.pods == {"uid-llama-0", "uid-llama-1"}
    for pod, allowed in (("uid-llama-0", True), ("uid-secret-0", False), ("uid-llama-9", False), ("", False)):
        assert may(found, Action.TRACE, Resource(uid=0, pod=pod)) is allowed
    assert not may(found, Action.TRACE, Resource(uid=1 << 31))  # the number is no user of this host


def test_where_a_request_names_pods_only_these_are_asked_about(cluster: fake.ApiServer) -> None:
    assert who(cluster, pods=frozenset({"uid-llama-1", "no-such"})).pods == {"uid-llama-1"}
    (review,) = cluster.asked("subjectaccessreviews")
    assert review["spec"]["resourceAttributes"]["name"] == "llama-1"


def test_pods_that_are_named_and_may_not_be_entered_are_refused(cluster: fake.ApiServer) -> None:
    reason, message = refused(cluster, pods=frozenset({"uid-secret-0"}))
    assert reason == "POD_EXEC_NEEDED"
    assert message.startswith("the Kubernetes user ada is not allowed to create pods/exec on this pod")
    assert who(cluster, pods=frozenset({"uid-of-another-node"})).pods == frozenset()


@pytest.mark.parametrize(
    ("auth", "text"),
    [
        ({}, "the call has none"),
        ({"authorization": [b"Basic YTpi"]}, "the call has none"),
        ({"authorization": [b"Bearer "]}, "the call has none"),
        ({"authorization": [b"Bearer " + b"x" * 70_000]}, "the call has none"),
        ({"authorization": [b"Bearer another"]}, "did not accept this token"),
    ],
)
def test_without_a_token_that_the_api_server_knows_nobody_is_identified(
    cluster: fake.ApiServer, auth: Any, text: str
) -> None:
    reason, message = refused(cluster, auth)
    assert reason == "NOT_IDENTIFIED" and text in message


def test_a_token_for_other_audiences_is_not_taken(cluster: fake.ApiServer) -> None:
    assert refused(cluster, audiences=("kinetod",))[0] == "NOT_IDENTIFIED"


@pytest.mark.parametrize("at", ["tokenreviews", "pods", "subjectaccessreviews"])
def test_where_the_api_server_refuses_us_everybody_is_refused(cluster: fake.ApiServer, at: str) -> None:
    cluster.forbidden.add((fake.ACCOUNT, at))
    reason, message = refused(cluster)
    assert reason == "KUBERNETES_UNAVAILABLE"
    assert f"denied kinetod's account access to {at} (HTTP 403)" in message


def test_an_api_server_that_does_not_answer_is_a_refusal_that_says_so(cluster: fake.ApiServer) -> None:
    cluster.silent = True
    reason, message = refused(cluster, deadline_s=0.2)
    assert reason == "KUBERNETES_UNAVAILABLE" and "did not answer within 0.2 s" in message


def test_who_has_very_many_pods_asked_about_keeps_no_other_user_waiting(cluster: fake.ApiServer) -> None:
    cluster.users["mallory-s"] = {"username": "mallory"}
    cluster.pods += [fake.pod(f"p{number}", uid=f"uid-p{number}") for number in range(80)]
    cluster.held, numbers = "mallory", {"ada": 1, "mallory": 2}

    async def number_of(name: str) -> int:
        return numbers[name]

    async def ask() -> Caller:
        api = ApiServer(("127.0.0.1", cluster.port), cluster.account, deadline_s=scaled(20))
        users = KubernetesUsers(Reviews(api), NodePods(api, "node-1"), number_of=number_of, audiences=tuple)
        fair_share_key.set("mallory")
        every = asyncio.create_task(users.caller(PEER, {"authorization": [b"Bearer mallory-s"]}, frozenset()))
        await soon(lambda: len(cluster.asked("subjectaccessreviews")) >= 5, "the API server is asked about five pods")
        fair_share_key.set("ada")
        one = await users.caller(PEER, ADA, frozenset({"uid-llama-0"}))
        assert not every.done()
        cluster.held = ""
        assert (await every).refusal is None
        api.close()
        return one

    one = asyncio.run(ask())
    assert one.refusal is None and one.pods == {"uid-llama-0"}


ON = replace(CONFIG, kubernetes=True, node_name="node-1")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (CONFIG, []),
        (ON, []),
        (replace(ON, node_name=""), ["kubernetes.node_name"]),
        (replace(ON, loopback_without_tls=True), ["access.loopback_without_tls"]),
        (replace(ON, kubernetes_listen=ListenAddress(path=Path("/s"))), ["access.kubernetes_listen"]),
        (replace(ON, kubernetes_listen=ListenAddress(host="0.0.0.0", port=1)), ["access.kubernetes_listen"]),
    ],
)
def test_settings_that_do_not_go_together_are_told(config: Config, names: list[str]) -> None:
    assert [name for name, _ in access_problems(config)] == names


@contextlib.asynccontextmanager
async def introducing(cluster: fake.ApiServer) -> AsyncIterator[KubernetesUsers]:
    async def number_of(_name: str) -> int:
        return 1 << 31

    api = ApiServer(("127.0.0.1", cluster.port), cluster.account, deadline_s=20)
    try:
        yield KubernetesUsers(Reviews(api), NodePods(api, "node-1"), number_of=number_of, audiences=tuple)
    finally:
        api.close()


def test_a_token_introduces_its_user_and_others_nobody(cluster: fake.ApiServer) -> None:
    async def run() -> None:
        async with introducing(cluster) as users:
            assert users.known(ADA) == ""
            assert await users.introduce("c1", ADA) == users.known(ADA) == "ada"
            assert fair_share_key.get() == "c1"  # it is that connection's turn
            assert await users.introduce("c1", {"authorization": [b"Bearer x"]}) == ""
            assert await users.introduce("c1", {}) == users.known({}) == ""

    asyncio.run(run())


def test_a_server_that_refuses_is_why_nobody_is_introduced(cluster: fake.ApiServer) -> None:
    cluster.forbidden.add((fake.ACCOUNT, "tokenreviews"))

    async def run() -> None:
        async with introducing(cluster) as users:
            with pytest.raises(NotPermitted) as refused:
                await users.introduce("c1", ADA)
            assert refused.value.reason is Reason.KUBERNETES_UNAVAILABLE

    asyncio.run(run())


class SlowReviews:
    """An API server that answers when it is told to, and knows nobody."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    async def user(self, _token: str, _audiences: object) -> None:
        await self.answers.wait()

    def known_user(self, _token: str, _audiences: object) -> None:
        return None


def test_so_many_calls_of_a_connection_wait_for_their_tokens_and_no_more() -> None:
    async def number_of(_name: str) -> int:
        return 1 << 31

    async def run() -> None:
        reviews = SlowReviews()
        pods = cast("NodePods", None)
        users = KubernetesUsers(cast("Reviews", reviews), pods, number_of=number_of, audiences=tuple)
        for _ in range(2):  # those that were answered wait no longer
            reviews.answers.clear()
            calls = [asyncio.create_task(users.introduce("c1", ADA)) for _ in range(INTRODUCED_AT_ONCE + 1)]
            calls.append(asyncio.create_task(users.introduce("c2", ADA)))
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            reviews.answers.set()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert done == {calls[-2]}
            assert isinstance(answers.pop(-2), Exhausted)
            assert answers == [""] * (INTRODUCED_AT_ONCE + 1)

    asyncio.run(run())


@pytest.mark.parametrize(("more", "taken"), [(0, True), (1, False)])
def test_a_token_that_is_longer_than_any_is_sent_to_nobody(cluster: fake.ApiServer, more: int, taken: bool) -> None:
    token = "t" * (MAX_TOKEN_CHARS + more)
    cluster.users[token] = {"username": "ada"}
    auth = {"authorization": [b"Bearer " + token.encode()]}
    if taken:
        assert who(cluster, auth).user == "ada"
    else:
        assert refused(cluster, auth)[0] == "NOT_IDENTIFIED"
        assert cluster.asked("tokenreviews") == []
