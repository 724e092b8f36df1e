"""Plug-ins arrive in sealed memory and stay what they were; a fork forgets them."""

import os
from typing import List

import pytest
from kineto_agent.protocol.plugin_bundle import Plugin
from kineto_agent.sources.plugins.installed import InstalledPlugins
from support.agent.plugins import ALL_SEALS, GOOD, plugin, sealed, sealed_bytes

TOY, OTHER = plugin(), plugin(name="other")


def named(plugins: InstalledPlugins) -> List[str]:
    return [source.name for source in plugins.sources()]


def took(*plugins: Plugin) -> InstalledPlugins:
    made = InstalledPlugins()
    made.take(sealed(list(plugins)), "first")
    return made


def test_what_was_taken_is_there() -> None:
    plugins = took(TOY, OTHER)
    assert named(plugins) == ["toy", "other"]
    assert plugins.sources()[0].activity_types() == ["toy_kernel"]


@pytest.mark.parametrize("missing", [1, 2, 4, 8])
def test_memory_that_somebody_could_still_change_is_not_taken(missing: int) -> None:
    plugins = InstalledPlugins()
    descriptor = sealed([TOY], ALL_SEALS & ~missing)
    plugins.take(descriptor, "first")
    assert named(plugins) == []
    if missing == 8:  # what anybody can write to may be the program's own by now
        os.close(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_nonsense_is_not_taken_and_does_not_take_away_what_is_there() -> None:
    plugins = took(TOY)
    plugins.take(sealed_bytes(b"nonsense"), "second")
    assert named(plugins) == ["toy"]


def test_the_same_ones_keep_what_they_have_loaded() -> None:
    plugins = took(TOY, OTHER)
    before = plugins.sources()
    plugins.take(sealed([TOY, plugin(GOOD + "\n", name="other")]), "second")
    after = plugins.sources()
    assert after[0] is before[0]
    assert after[1] is not before[1]


def test_a_daemon_without_plug_ins_withdraws_those_of_another_one() -> None:
    plugins = took(TOY)
    plugins.withdraw()
    assert named(plugins) == []
    plugins.take(sealed([TOY]), "first")
    assert named(plugins) == ["toy"]


def test_one_that_was_given_up_stays_so_in_a_newer_version() -> None:
    plugins = took(TOY)
    plugins.sources()[0].worker.given_up = "start() did not return"
    plugins.take(sealed([plugin(GOOD + "\n")]), "second")
    (source,) = plugins.sources()
    assert source.activity_types() == []
    trouble = source.trouble(frozenset())
    assert trouble is not None
    assert (trouble.reason_code, trouble.reason) == ("PLUGIN_TIMEOUT", "start() did not return")


def test_one_that_was_given_up_stays_so_although_another_daemon_did_not_have_it() -> None:
    plugins = took(TOY)
    worker = plugins.sources()[0].worker
    worker.given_up = "start() did not return"
    plugins.take(sealed([OTHER]), "second")
    plugins.take(sealed([TOY]), "first")
    (source,) = plugins.sources()
    assert source.worker is worker
    assert source.activity_types() == []


def test_a_fork_forgets_them() -> None:
    from kineto_agent.sources.plugins.installed import PLUGINS

    PLUGINS.take(sealed([TOY]), "first")
    try:
        child = os.fork()
        if child == 0:
            os._exit(len(PLUGINS.sources()))
        assert os.waitpid(child, 0)[1] == 0
        assert named(PLUGINS) == ["toy"]
    finally:
        PLUGINS.forget()
