import pytest
from kinetod.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("128MiB", 134217728), ("1.5 GiB", 1610612736), ("2kB", 2000), ("0", 0), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 parsec", "1e9", "1 2MiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size like 128MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "duration_ns"), [("500ms", 500_000_000), ("5s", 5_000_000_000), ("10min", 600_000_000_000), ("7ns", 7)]
)
def test_durations(text: str, duration_ns: int) -> None:
    assert parse_duration(text) == duration_ns


@pytest.mark.parametrize("text", ["5", "soon", "-5s", "5 minutes"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration like 500ms"):
        parse_duration(text)


def test_texts_are_short() -> None:
    assert [format_duration(each) for each in (1_500_000, 1_500_000_000, 600_000_000_000, 7 * 86_400 * 10**9)] == [
        "1.5 ms",
        "1.5 s",
        "10 min",
        "7 days",
    ]
    assert [format_size(each) for each in (12, 2048, 128 << 20, 3 << 29)] == [
        "12 bytes",
        "2 KiB",
        "128 MiB",
        "1.5 GiB",
    ]
