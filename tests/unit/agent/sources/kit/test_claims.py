"""Two agents in one process and a vendor's library."""

import os
import sys

import pytest
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.kit.claims import Claim


def claim(library: str = "/a/collector.so") -> Claim:
    return Claim("test_vendor", "the vendor", library, "VENDOR_BUSY")


def test_a_second_agent_is_refused_until_the_first_has_ended() -> None:
    first, second = claim(), claim("/b/collector.so")
    first.take()
    with pytest.raises(SourceError, match=r"recording with the vendor \(its collector is /a/collector\.so\)") as caught:
        second.take()
    assert caught.value.reason_code == "VENDOR_BUSY"
    first.release()
    second.take()
    second.release()
    assert not hasattr(sys, "_kineto_test_vendor")


def test_who_was_refused_takes_nothing_from_the_holder() -> None:
    first, second = claim(), claim()
    first.take()
    second.release()
    assert hasattr(sys, "_kineto_test_vendor")
    first.release()


def test_a_claim_of_the_parent_does_not_bind_a_forked_child() -> None:
    first = claim()
    first.take()
    child = os.fork()
    if child == 0:
        claim("/b/collector.so").take()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    first.release()
