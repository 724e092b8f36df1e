"""What a terminal sends for keys, by name. Pure."""

import re

NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end",
    b"\x1bOP": "f1", b"\x1b[11~": "f1", b"\x1b[[A": "f1",
    b"\x1bOS": "f4", b"\x1b[14~": "f4", b"\x1b[[D": "f4",
    b"\x1b[17~": "f6", b"\x1b[21~": "f10",
    b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace", b"\x15": "erase",
    b"\x03": "q", b"\x04": "q",  # in a terminal that makes no signals of them
}  # fmt: skip
# Of the standard forms for keys: an escape sequence (CSI, SS3, or Linux's own for F1 to F5), a character, another byte.
_KEY = re.compile(
    rb"\x1b\[\[[A-E]|\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[\xc2-\xf4][\x80-\xbf]{1,3}|[\x00-\x7f\x80-\xff]", re.DOTALL
)
_UNFINISHED = re.compile(
    rb"\x1b(\[\[?|\[[0-?]*[ -/]*|O)?|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}"
)


def decode(data: bytes, *, complete: bool) -> tuple[list[str], bytes]:
    """The keys in what was read, and the beginning of one whose rest is still to come.

    complete: nothing more came for a while, so a lone Esc is that key. Characters stand for themselves; sequences of
    other keys are left out.
    """
    keys: list[str] = []
    while data:
        if _UNFINISHED.fullmatch(data):
            return (keys, data) if not complete else ([*keys, *(["esc"] if data == b"\x1b" else [])], b"")
        found = _KEY.match(data)
        assert found is not None  # the last alternative takes any byte
        text, data = found[0], data[found.end() :]
        name = NAMES.get(text) or ("esc" if text == b"\x1b" else _character(text))
        keys += [name] if name else []
    return keys, b""


def _character(text: bytes) -> str:
    shown = text.decode("utf-8", "ignore")
    return shown if shown.isprintable() else ""
