"""What waits for Ctrl-C."""

import threading

import pytest
from kinetoctl.output.console import wait_until_set


class _Missed(threading.Event):
    """As after a signal that CPython has noted just before it waits: only a wait that ends lets its handler run."""

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, "goes on for ever"
        assert timeout <= 1
        raise KeyboardInterrupt


def test_a_ctrl_c_just_before_the_wait_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        wait_until_set(_Missed())
