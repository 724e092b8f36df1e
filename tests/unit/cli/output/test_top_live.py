"""The terminal while a live view has it."""

import os
import pty
import signal
import termios
import threading
from collections.abc import Callable, Iterator

import pytest
from kinetoctl.output.top_live import SIGNALS, Terminal, decode

PATIENCE_S = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """A pseudo-terminal: where keys are typed, and where the program reads them."""
    outer, inner = pty.openpty()
    yield outer, inner
    os.close(outer)
    os.close(inner)


def nothing() -> None:
    """Neither takes a screen nor gives it back."""


def raises() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("show", [nothing, raises])
def test_modes_and_handlers_are_restored_after_an_error(ends: tuple[int, int], show: Callable[[], None]) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    modes, hidden = termios.tcgetattr(ends[1]), list[bool]()
    with (
        pytest.raises(ZeroDivisionError),
        Terminal(ends[1], show=show, hide=lambda: hidden.append(True)).taken(),
    ):
        assert termios.tcgetattr(ends[1]) != modes
        raises()
    assert (termios.tcgetattr(ends[1]), hidden) == (modes, [True])
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_keys_come_one_by_one_and_esc_after_a_moment(ends: tuple[int, int]) -> None:
    terminal = Terminal(ends[1], show=nothing, hide=nothing)
    with terminal.taken():
        os.write(ends[0], b"j\x1b[A\x1b")
        assert terminal.wait(PATIENCE_S) == ["j", "up"]
        assert terminal.wait(PATIENCE_S) == ["esc"]
        assert terminal.wait(0) == []


def test_a_wake_ends_the_wait_and_after_the_end_touches_no_descriptor() -> None:
    terminal = Terminal(None, show=nothing, hide=nothing)
    with terminal.taken():
        thread = threading.Thread(target=terminal.wake)
        thread.start()
        assert terminal.wait(PATIENCE_S) == []
        thread.join()
    reader, writer = os.pipe2(os.O_NONBLOCK)  # has the numbers that were closed
    terminal.wake()
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.close(reader)
    os.close(writer)


def test_a_terminal_that_was_closed_is_left() -> None:
    outer, inner = pty.openpty()
    terminal = Terminal(inner, show=nothing, hide=nothing)
    with terminal.taken():
        os.close(outer)
        assert terminal.wait(PATIENCE_S) == ["q"]
    os.close(inner)


def test_the_first_interrupt_is_noted_and_the_second_raised(ends: tuple[int, int]) -> None:
    terminal = Terminal(ends[1], show=nothing, hide=nothing)
    with terminal.taken():
        signal.raise_signal(signal.SIGINT)
        assert terminal.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        (b"jk/", ["j", "k", "/"]),
        (b"\x1b[A\x1bOB", ["up", "down"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        (b"\x1bOP\x1b[14~\x1b[21~", ["f1", "f4", "f10"]),
        (b"\r\x7f\x15", ["enter", "backspace", "erase"]),
        ("é訓".encode(), ["é", "訓"]),
        (b"\x1b[1;5A\x1b[200~q", ["q"]),  # Ctrl-Up, the start of a paste
        (b"\x00\x07\xff\xc3(", ["("]),
        (b"\x1bq", ["esc", "q"]),
    ],
)
def test_keys_have_names_and_others_are_left_out(sent: bytes, keys: list[str]) -> None:
    assert decode(sent, complete=False) == (keys, b"")


@pytest.mark.parametrize("begun", [b"\x1b", b"\x1b[", b"\x1b[1;", b"\x1bO", b"\xc3", b"\xe8\xa8"])
def test_a_key_that_has_only_begun_waits_for_its_rest(begun: bytes) -> None:
    assert decode(b"a" + begun, complete=False) == (["a"], begun)


def test_esc_is_a_key_if_nothing_follows_it() -> None:
    assert decode(b"\x1b", complete=True) == (["esc"], b"")
    assert decode(b"\x1b[", complete=True) == ([], b"")
