"""Durations and sizes, read and written."""

import re

import pytest
from kineto_protos.units import format_duration, format_size, parse_duration_ns, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("7ns", 7),
        ("10 us", 10_000),
        ("3µs", 3_000),
        ("500ms", 500_000_000),
        ("5s", 5_000_000_000),
        ("1.5s", 1_500_000_000),
        ("2min", 120_000_000_000),
        ("2m", 120_000_000_000),
        (" 10 MIN ", 600_000_000_000),
        ("1h", 3_600_000_000_000),
        ("24h", 86_400_000_000_000),
        ("1d", 86_400_000_000_000),
        ("-5s", -5_000_000_000),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, expected_ns: int) -> None:
    assert parse_duration_ns(text) == expected_ns


@pytest.mark.parametrize("text", ["soon", "5", "", "s", "5 parsecs", "5 minutes", "1e3s", "five s"])
def test_another_text_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expected a duration like 500ms, 5s or 2min, got {text!r}")):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512 b", 512),
        ("2kB", 2000),
        ("1GB", 1_000_000_000),
        ("128MiB", 134_217_728),
        ("128mib", 134_217_728),
        ("1.5 GiB", 1_610_612_736),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_a_size_is_a_number_and_perhaps_a_unit(text: str, expected: int) -> None:
    assert parse_size_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "-1GiB", "1 parsec", "1e9", "1 2MiB", "big"])
def test_another_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expected a size like 128MiB, 8GiB or 4096, got {text!r}")):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("duration_ns", "expected"),
    [
        (0, "0 ns"),
        (310_000, "310 µs"),
        (1_500_000, "1.5 ms"),
        (14_000_000, "14 ms"),
        (999_700_000, "1000 ms"),
        (1_250_000_000, "1.25 s"),
        (1_500_000_000, "1.5 s"),
        (303_000_000_000, "5 min 3 s"),
        (600_000_000_000, "10 min"),
        (5_400_000_000_000, "1 h 30 min"),
        (86_400_000_000_000, "1 day"),
        (604_800_000_000_000, "7 days"),
    ],
)
def test_durations_read_well(duration_ns: int, expected: str) -> None:
    assert format_duration(duration_ns) == expected


@pytest.mark.parametrize(
    ("size", "expected"), [(12, "12 bytes"), (2048, "2 KiB"), (128 << 20, "128 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_read_well(size: int, expected: str) -> None:
    assert format_size(size) == expected
