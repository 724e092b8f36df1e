"""The memfd with the collector that a live attach brings along, while it is closed."""

import os
from typing import List

import pytest
from kineto_agent.bootstrap import live_attach
from kineto_agent.sources import collector_library
from kineto_agent.system import c_functions, descriptors
from support.machine.descriptors import open_files


def test_a_child_that_is_forked_while_the_memfd_is_closed_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert live_attach  # its fork hook
    statuses: List[int] = []
    ours = descriptors.memfd("kineto-own-library", 0)

    def fork() -> None:
        monkeypatch.undo()
        child = os.fork()
        if not child:
            os._exit(any("kineto-own-library" in name for name in open_files(os.getpid()).values()))
        statuses.append(os.waitpid(child, 0)[1])

    collector_library.bring(ours, 1)
    monkeypatch.setattr(descriptors, "_begin_turn", fork)  # there, the GIL is given away
    collector_library.close()
    assert statuses == [0]
    assert ours not in open_files(os.getpid())


def test_a_child_that_is_forked_while_the_loader_opens_the_memfd_does_not_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert live_attach  # its fork hook
    statuses: List[int] = []

    def dlopen(path: bytes, _mode: int) -> int:
        its_own = os.open(path, os.O_RDONLY)
        child = os.fork()
        if not child:
            os._exit(any("kineto-own-library" in name for name in open_files(os.getpid()).values()))
        statuses.append(os.waitpid(child, 0)[1])
        os.close(its_own)
        return 1

    monkeypatch.setattr(c_functions, "_dlopen", dlopen)
    collector_library.bring(descriptors.memfd("kineto-own-library", 0), 1)
    c_functions.open_library(collector_library.path())
    collector_library.close()
    assert statuses == [0]
