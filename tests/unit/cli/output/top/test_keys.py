"""What a terminal sends for keys."""

import pytest
from kinetoctl.output.top.keys import decode


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
