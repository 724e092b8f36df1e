"""Clients and agents that do not read, or say nothing."""

import random
from collections.abc import Iterator

import pytest
from campaign.parts.faults import Site
from campaign.parts.faults_peers import silent_connections, slow_agent, slow_client, with_short_deadline

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def host() -> Iterator[Site]:
    with with_short_deadline() as running:
        running.note_before()
        yield running


def test_a_client_that_reads_none_of_its_streams_harms_nobody(host: Site) -> None:
    slow_client(host, random.Random(), unread_s=0.5)
    host.forget()
    host.note_after()


def test_an_agent_that_reads_nothing_fails_alone_and_comes_back(host: Site) -> None:
    slow_agent(host, random.Random())
    host.forget()
    host.note_after()


def test_two_thousand_connections_that_say_nothing_keep_nobody_out(host: Site) -> None:
    silent_connections(host, random.Random(), hang_up=True)
    host.forget()
    host.note_after()
