"""The API server as the daemon asks it: a real one of the tests' own, over HTTPS."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from kinetod.kubernetes.api_server import THREADS, ApiError, ApiServer, NodePods, Reviews, User, address_in
from support.peers import api_server as fake
from support.peers.certificates import Authority
from support.peers.dripping import BODY, HANDSHAKE, HEAD, dripping
from support.waiting import scaled

T = TypeVar("T")
ADA = {"username": "ada", "uid": "7", "groups": ["ml"], "extra": {"scopes": ["a", "b"]}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def api(cluster: fake.ApiServer, deadline_s: float = 20) -> AsyncIterator[ApiServer]:
    made = ApiServer(("127.0.0.1", cluster.port), cluster.account, deadline_s=deadline_s)
    try:
        yield made
    finally:
        made.close()


def ask(cluster: fake.ApiServer, what: Callable[[ApiServer], Awaitable[T]], deadline_s: float = 20) -> T:
    async def asked() -> T:
        async with api(cluster, deadline_s) as server:
            return await what(server)

    return asyncio.run(asked())


def problem(cluster: fake.ApiServer, deadline_s: float = 20) -> str:
    with pytest.raises(ApiError) as raised:
        ask(cluster, lambda server: Reviews(server).user("token"), deadline_s)
    return str(raised.value).replace(str(cluster.port), "PORT")


def test_a_token_is_its_users(cluster: fake.ApiServer) -> None:
    cluster.users["secret"] = ADA
    found = ask(cluster, lambda server: Reviews(server).user("secret"))
    assert found == User("ada", "7", ("ml",), '{"scopes":["a","b"]}')
    assert ask(cluster, lambda server: Reviews(server).user("another")) is None


def test_a_token_for_others_is_nobodys(cluster: fake.ApiServer) -> None:
    cluster.users |= {"for-us": {**ADA, "audiences": ["kinetod"]}, "for-all": ADA}

    async def users(server: ApiServer) -> list[bool]:
        reviews = Reviews(server)
        return [await reviews.user(token, ("kinetod",)) is not None for token in ("for-us", "for-all")]

    assert ask(cluster, users) == [True, False]


def test_who_may_exec_into_a_pod_is_asked_with_all_that_the_token_said(cluster: fake.ApiServer) -> None:
    cluster.users["secret"] = ADA
    cluster.execs.add(("ada", "training", "llama-0"))

    async def may(server: ApiServer) -> list[bool]:
        reviews = Reviews(server)
        user = await reviews.user("secret")
        assert user is not None
        return [await reviews.may_exec(user, "training", name) for name in ("llama-0", "llama-1")]

    assert ask(cluster, may) == [True, False]
    assert cluster.asked("subjectaccessreviews")[0]["spec"] == {
        "resourceAttributes": {
            "namespace": "training", "verb": "create", "version": "v1", "resource": "pods", "subresource": "exec",
            "name": "llama-0",
        },
        "user": "ada", "uid": "7", "groups": ["ml"], "extra": {"scopes": ["a", "b"]},
    }  # fmt: skip


def test_yes_and_no_count_for_a_few_seconds(cluster: fake.ApiServer) -> None:
    clock, seen = Clock(), list[bool]()
    cluster.users["secret"] = ADA

    async def over_time(server: ApiServer) -> None:
        reviews = Reviews(server, clock)
        for clock.now, allowed in ((0, True), (4.9, False), (5, False), (9.9, True), (10, True)):
            cluster.execs = {("ada", "ml", "x")} if allowed else set()
            user = await reviews.user("secret")
            assert user is not None
            seen.append(await reviews.may_exec(user, "ml", "x"))

    ask(cluster, over_time)
    assert seen == [True, True, False, False, True]
    assert (len(cluster.asked("tokenreviews")), len(cluster.asked("subjectaccessreviews"))) == (3, 3)


def test_the_pods_of_a_node_have_names_by_uid(cluster: fake.ApiServer) -> None:
    cluster.pods = [fake.pod("llama-0", uid="u0"), fake.pod("llama-1", uid="u1", node="node-2")]
    clock = Clock()

    async def over_time(server: ApiServer) -> list[list[str]]:
        pods, seen = NodePods(server, "node-1", clock), []
        seen.append(sorted(await pods.current()))
        cluster.pods.append(fake.pod("new", uid="u2"))
        clock.now = 0.1
        seen.append(sorted(await pods.current(["u2"])))  # not again at once
        clock.now = 0.6
        seen.append(sorted(await pods.current()))
        seen.append(sorted(await pods.current(["u2"])))
        return seen

    assert ask(cluster, over_time) == [["u0"], ["u0"], ["u0"], ["u0", "u2"]]
    assert ask(cluster, lambda server: NodePods(server, "node-2").current()) == {"u1": ("training", "llama-1")}


def test_an_api_server_that_says_nothing_is_given_up(cluster: fake.ApiServer) -> None:
    cluster.silent = True
    assert problem(cluster, deadline_s=0.3) == "the API server (127.0.0.1:PORT) did not answer within 0.3 s"


@pytest.mark.parametrize("said", [HANDSHAKE, HEAD, BODY])
def test_an_api_server_that_answers_byte_by_byte_is_given_up_and_holds_no_end_up(
    cluster: fake.ApiServer, said: bytes
) -> None:
    with dripping(said, cluster.folder if said is not HANDSHAKE else None) as server:
        began, real, cluster.port = time.monotonic(), cluster.port, server.port
        assert problem(cluster, deadline_s=0.5).endswith("did not answer within 0.5 s")
        assert time.monotonic() - began < scaled(10)  # closed too
        cluster.port = real


@pytest.mark.slow
def test_calls_that_drip_leave_threads_to_others(cluster: fake.ApiServer) -> None:
    cluster.users["secret"] = ADA

    async def after_drips(made: ApiServer) -> User | None:
        address, made._address = made._address, ("127.0.0.1", server.port)
        drips = [Reviews(made).user(f"{number}") for number in range(2 * THREADS)]
        assert {type(each) for each in await asyncio.gather(*drips, return_exceptions=True)} == {ApiError}
        made._address = address
        return await Reviews(made).user("secret")

    with dripping(BODY, cluster.folder) as server:
        assert ask(cluster, after_drips, deadline_s=2) is not None


def test_what_is_under_way_when_the_daemon_stops_is_given_up(cluster: fake.ApiServer) -> None:
    async def stopped() -> str:
        made = ApiServer(("127.0.0.1", server.port), cluster.account, deadline_s=60)
        asking = asyncio.create_task(Reviews(made).user("token"))
        await asyncio.to_thread(server.met.wait, 30)
        await asyncio.to_thread(made.close)
        with pytest.raises(ApiError) as raised:
            await asking
        return str(raised.value)

    with dripping(BODY, cluster.folder) as server:
        began = time.monotonic()
        assert asyncio.run(stopped()).endswith("is no longer queried because kinetod is stopping")
        assert time.monotonic() - began < scaled(10)


def test_an_account_without_its_role_is_said(cluster: fake.ApiServer) -> None:
    cluster.forbidden.add((fake.ACCOUNT, "tokenreviews"))
    assert problem(cluster) == (
        "the API server (127.0.0.1:PORT) denied kinetod's account access to tokenreviews (HTTP 403); "
        "is its ClusterRole bound?"
    )


def test_a_server_with_a_certificate_of_others_is_not_talked_to(cluster: fake.ApiServer) -> None:
    (cluster.account / "ca.crt").write_bytes(Authority().certificate)
    assert "certificate verify failed" in problem(cluster)
    assert cluster.requests == []


def test_without_an_account_the_file_is_named(cluster: fake.ApiServer) -> None:
    (cluster.account / "token").unlink()
    assert str(cluster.account / "token") in problem(cluster)


def test_a_renewed_token_is_taken_and_a_connection_is_kept(cluster: fake.ApiServer) -> None:
    async def twice(server: ApiServer) -> None:
        await Reviews(server).user("a")
        cluster.users["renewed"] = {"username": fake.ACCOUNT}
        (cluster.account / "token").write_text("renewed")
        (cluster.account / "ca.crt").write_text("no longer needed")
        await Reviews(server).user("b")

    ask(cluster, twice)
    assert len(cluster.asked("tokenreviews")) == 2


def test_an_api_server_that_was_started_again_is_asked_over_a_new_connection(tmp_path: Path) -> None:
    async def over_restart(server: ApiServer) -> None:
        await Reviews(server).user("a")

    with fake.api_server(tmp_path / "one") as first:
        made = ApiServer(("127.0.0.1", first.port), first.account)
        asyncio.run(over_restart(made))
    with pytest.raises(ApiError, match="cannot be reached"):
        asyncio.run(over_restart(made))
    with fake.api_server(tmp_path / "two", port=first.port) as second:
        (first.account / "ca.crt").write_bytes((second.account / "ca.crt").read_bytes())
        asyncio.run(over_restart(made))
    made.close()


@pytest.mark.parametrize(
    "environ",
    [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"KUBERNETES_SERVICE_HOST": "x", "KUBERNETES_SERVICE_PORT": "0"}],
)
def test_outside_of_pods_there_is_no_api_server(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is this a pod"):
        address_in(environ)
