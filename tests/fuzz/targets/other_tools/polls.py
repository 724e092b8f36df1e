"""Datagrams of libkineto's imitators: the codec alone, and a registry that gets what it lets through.

An input is datagrams, each with its length before it as u16. The registry knows one process, this one.
"""

import asyncio
import os
import struct
from collections.abc import Iterator

from kinetod.kineto_ipc import poller_registry
from kinetod.kineto_ipc.poll_sockets import Sender
from kinetod.kineto_ipc.poller_registry import BadDatagram, OfferEvent, Poll, PollerRegistry, Registration
from support.peers import libkineto

CONFIGURATION = b"ACTIVITIES_DURATION_MSECS=500\n"
_ME = Sender(os.getpid(), os.getuid(), os.getgid(), b"\0fuzz\0")
_HEADER_BYTES = 40


def play(data: bytes) -> None:
    asyncio.run(_play(data))


async def _play(data: bytes) -> None:
    registry = PollerRegistry(asyncio.get_running_loop())
    events: list[OfferEvent] = []
    try:
        for at, datagram in enumerate(_datagrams(data)):
            _one(registry, datagram, at, events)
        await asyncio.sleep(0)
    finally:
        registry.close()
    order = list(OfferEvent)
    assert events == sorted(events, key=order.index), events
    assert events.count(OfferEvent.TAKEN) <= 1 and events.count(OfferEvent.OVER) <= 1


def _one(registry: PollerRegistry, datagram: bytes, at: int, events: list[OfferEvent]) -> None:
    try:
        message = poller_registry.decode(datagram)
    except BadDatagram as exc:
        assert len(str(exc)) < 200
        return
    (size,) = struct.unpack_from("<Q", datagram)
    assert size == len(datagram) - _HEADER_BYTES
    if isinstance(message, Registration):
        assert registry.registered(message, _ME, now_s=at) == 1
        return
    assert isinstance(message, Poll) and len(message.pids) <= poller_registry.MAX_PIDS
    answer = registry.polled(message, _ME, now_s=at, now_ns=at + 1)
    registry.sent(answer)
    assert answer.configuration in (b"", CONFIGURATION) and (message.free or not answer.configuration)
    assert answer.poller.tracing != message.free
    if at == 0:
        answer.poller.offer(CONFIGURATION, events.append)


def _datagrams(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from("<H", data, at)
        yield data[at + 2 : at + 2 + length]
        at += 2 + length


def seeds() -> Iterator[bytes]:
    """What torch 2.13 sends: idle, and through a trace; an older libkineto."""
    pids = (2016, 2015, 2000, 1)
    for polled in ([3, 3, 1, 1, 3], [2, 2, 0, 2]):
        yield b"".join(_packed(libkineto.poll(wants, pids=pids, job=77)) for wants in polled)
    yield _packed(libkineto.registration(0, 2016, 77)) + _packed(libkineto.poll(pids=pids))
    yield _packed(libkineto.poll()) + _packed(libkineto.poll(pids=pids, count=5)) + _packed(b"")


def _packed(datagram: bytes) -> bytes:
    return struct.pack("<H", len(datagram)) + datagram
