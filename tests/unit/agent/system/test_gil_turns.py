"""What the native thread that sees to turns with the GIL is told."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
from kineto_agent.system.gil_turns import Turns
from support.waiting import scaled


@pytest.fixture
def words() -> Any:
    """rest, over, queueing."""
    return (ctypes.c_int * 3)()


def test_each_rest_is_another_one(words: Any) -> None:
    turns = Turns(ctypes.addressof(words))
    told = []
    for limit_ms in (100, 100, 0, 0):
        turns.rest(limit_ms)
        told.append(words[0])
        turns.work()
        assert words[0] == 0
    assert [word >> 1 for word in told] == [100, 100, 0, 0]
    assert told[0] != told[1]


def test_a_rest_without_end_and_one_of_days(words: Any) -> None:
    turns = Turns(ctypes.addressof(words))
    turns.rest(-1)
    assert words[0] == -1
    turns.rest(2**40)
    assert words[0] > 2**30


def test_the_end_waits_for_what_is_being_queued(words: Any) -> None:
    turns = Turns(ctypes.addressof(words))
    words[2] = 1
    ended = threading.Thread(target=turns.end)
    ended.start()
    while not words[1]:
        pass
    assert ended.is_alive()
    words[2] = 0
    ended.join(scaled(30))
    assert not ended.is_alive()


def test_without_such_a_thread_nothing_is_told() -> None:
    turns = Turns()
    turns.rest(5)
    turns.work()
    turns.end()
    assert turns._bit == 0
