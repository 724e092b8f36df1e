"""The table of debug offsets: decoded as the releases' own compiler sees their structures, refused otherwise."""

import struct
from typing import Tuple

import pytest
from kinetod.attach.debug_offsets import DebugOffsets, decode

COOKIE = int.from_bytes(b"xdebugpy", "little")
# As Debian's 3.14.10 and 3.15.2 have them; the expected offsets below are what a C compiler says of their headers.
PYTHON_3_14 = (
    *(COOKIE, 0x030E0AF0, 0, 316616, 784, 808),
    *(225864, 7280, 7272, 7344, 7360, 7408, 7688, 7672, 7680, 16, 7784, 0, 7800, 7792, 7992, 0),
    *(832, 0, 8, 16, 72, 152, 160, 232, 32),
    *(88, 8, 0, 56, 80, 74, 64, 0, 216, 112, 120, 128, 136, 68, 52, 96, 104, 208, 0, 16, 8, 416, 24, 88, 168),
    *(40, 32, 16, 40, 24, 16, 200, 24, 40, 32, 48, 32, 40, 24, 16, 32, 16, 24, 40, 16, 32, 64, 32, 16, 40, 264, 192),
    *(160, 24, 72, 67, 0, 8, 24, 304, 8076, 0, 4, 512),
)
PYTHON_3_15 = (
    *(COOKIE, 0x030F02F0, 0, 346568, 912, 936),
    *(226240, 7272, 7264, 7336, 7352, 7400, 7592, 7576, 7584, 16, 7736, 0, 7752, 7744, 7944, 0),
    *(888, 0, 8, 16, 72, 80, 88, 96, 176, 184, 256, 32, 36, 40, 136, 288, 0),
    *(88, 8, 0, 56, 80, 74, 64, 0, 216, 112, 120, 128, 136, 68, 52, 96, 104, 208, 0, 16, 8),
    *(424, 24, 88, 168, 32, 288, 944, 888, 40, 32, 16, 40, 24, 16, 200, 24, 40, 32, 48, 32, 40, 24, 16, 32, 16, 24),
    *(40, 16, 32, 64, 32, 16, 40, 56, 176, 112, 120, 1120, 104, 160, 24, 72, 67, 0, 8, 24, 344, 8028, 0, 4, 512),
)


def table(values: Tuple[int, ...], **changed: int) -> bytes:
    places = {"cookie": 0, "version": 1, "free_threaded": 2, "finalizing": 4, "path_size": len(values) - 1}
    words = list(values)
    for name, value in changed.items():
        words[places[name]] = value
    return struct.pack(f"<{len(words)}Q", *words).ljust(1024, b"\0")


def test_3_14_is_read_as_its_compiler_lays_it_out() -> None:
    assert decode(table(PYTHON_3_14), 316616) == DebugOffsets(
        version=(3, 14),
        finalizing=784,
        interpreters_head=808,
        interpreter_id=7280,
        next_interpreter=7272,
        threads_main=7360,
        remote_debugging_enabled=8076,
        thread_interpreter=16,
        eval_breaker=24,
        pending_call=304,
        script_path=308,
    )


def test_3_15_is_read_as_its_compiler_lays_it_out() -> None:
    assert decode(table(PYTHON_3_15), 346568) == DebugOffsets(
        version=(3, 15),
        finalizing=912,
        interpreters_head=936,
        interpreter_id=7272,
        next_interpreter=7264,
        threads_main=7352,
        remote_debugging_enabled=8028,
        thread_interpreter=16,
        eval_breaker=24,
        pending_call=344,
        script_path=348,
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"cookie": 0}, "does not begin with a table of debug offsets"),
        ({"version": 0x031000F0}, "of a Python 3.16 that is not known"),
        ({"version": 0x030E00A1}, "of a Python 3.14 that is not known"),  # an alpha
        ({"version": 0x030F02F0}, "contradict themselves"),  # the layout of another release
        ({"free_threaded": 1}, "free-threaded build"),
        ({"finalizing": 316616}, r"contradict themselves \(runtime_state.finalizing\)"),
        ({"path_size": 256}, r"contradict themselves \(length of the script's path\)"),
    ],
)
def test_what_is_not_known_for_sure_is_refused(changed: "dict[str, int]", why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(table(PYTHON_3_14, **changed), 316616)


def test_a_runtime_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size of _PyRuntime"):
        decode(table(PYTHON_3_14), 316608)


def test_a_table_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="cut off"):
        decode(table(PYTHON_3_14)[:512], 316616)
