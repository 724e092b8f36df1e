"""Durations and sizes, read and written."""

import re
import resource
from pathlib import Path
from random import Random

import pytest
from kineto_trace.base import quantities
from kineto_trace.base.quantities import (
    KEPT_FREE_BYTES,
    format_duration,
    format_size,
    free_memory,
    held_to_free_memory,
    lasted,
    memory_errors,
    more,
    parse_duration_ns,
    parse_size_bytes,
    shortened,
    shortened_apart,
)

KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, at::native::"
    "binary_internal::{0}<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::{0}<float> >, std::array<char*, 3ul>)"
)


def test_what_is_left_out_is_counted_with_its_noun() -> None:
    assert [more(1, "row"), more(1200, "row"), more(2, "process", "processes")] == [
        "1 more row",
        "1,200 more rows",
        "2 more processes",
    ]


def test_names_that_are_listed_together_keep_the_parts_in_which_they_differ() -> None:
    names = [KERNEL.format("MulFunctor"), KERNEL.format("AddFunctor"), "gemm", KERNEL.format("MulFunctor")]
    assert shortened_apart(names, 56) == [
        "void at::na…MulFunctor<float> >, std::array<…har*, 3ul>)",
        "void at::na…AddFunctor<float> >, std::array<…har*, 3ul>)",
        "gemm",
        "void at::na…MulFunctor<float> >, std::array<…har*, 3ul>)",
    ]


def test_a_long_name_alone_is_cut_in_its_middle() -> None:
    assert shortened("void cutlass::gemm<float, 128>(Params)", 20) == "void cutlass…Params)"
    assert shortened_apart([KERNEL, "x" * 30 + "y" * 30], 20) == ["void at::nat…, 3ul>)", "x" * 12 + "…" + "y" * 7]


@pytest.mark.parametrize("seed", range(20))
def test_no_two_different_names_become_equal_however_alike_they_are(seed: int) -> None:
    random = Random(seed)
    names = ["".join(random.choices("ab", k=random.randint(0, 60))) for _ in range(200)]
    for most in (8, 20, 36):
        shown = shortened_apart(names, most)
        assert len(set(shown)) == len(set(names))
        assert all(len(text) <= most for text in shown)


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
        ("5", 5_000_000_000),
        (" 1.5 ", 1_500_000_000),
        ("0", 0),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_with_a_unit(text: str, expected_ns: int) -> None:
    assert parse_duration_ns(text) == expected_ns


@pytest.mark.parametrize("text", ["soon", "", "s", "5 parsecs", "5 minutes", "1e3s", "five s"])
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
        (999_700_000, "1 s"),
        (0.25, "0.25 ns"),
        (-14_000_000, "-14 ms"),
        (59_980_000_000, "1 min"),
        (float("nan"), "nan"),
        (1_250_000_000, "1.25 s"),
        (1_500_000_000, "1.5 s"),
        (303_000_000_000, "5 min 3 s"),
        (600_000_000_000, "10 min"),
        (5_400_000_000_000, "1 h 30 min"),
        (86_400_000_000_000, "1 day"),
        (604_800_000_000_000, "7 days"),
    ],
)
def test_durations_read_well(duration_ns: float, expected: str) -> None:
    assert format_duration(duration_ns) == expected


def test_what_began_by_a_clock_that_was_set_back_since_has_lasted_no_time() -> None:
    assert (lasted(5, 1_000_005), lasted(1_000_005, 5)) == ("1 ms", "0 ns")


@pytest.mark.parametrize(
    ("size", "expected"), [(12, "12 bytes"), (2048, "2 KiB"), (128 << 20, "128 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_read_well(size: int, expected: str) -> None:
    assert format_size(size) == expected


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/a/b", "a", "memory.max", "memory.current"),
        ("0::/a/b", "", "memory.max", "memory.current"),  # of a container, whose own group is the root
        ("4:memory:/a/b", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_what_is_free_below_the_limits_of_control_groups_counts(
    tmp_path: Path, line: str, folder: str, limit: str, used: str
) -> None:
    proc, group = tmp_path / "proc", tmp_path / "groups" / folder
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 1000 kB\n")
    (proc / "self" / "cgroup").write_text(f"7:cpu:/other\n{line}\n")
    assert free_memory(proc, tmp_path / "groups") == 1_024_000
    group.mkdir(parents=True, exist_ok=True)
    for name, content in ((limit, "70000\n"), (used, "30000\n"), ("memory.stat", "anon 1\ninactive_file 5000\n")):
        (group / name).write_text(content)
    assert free_memory(proc, tmp_path / "groups") == 45_000
    (group / limit).write_text("max\n")
    assert free_memory(proc, tmp_path / "groups") == 1_024_000


def test_more_than_is_free_is_an_error_that_says_for_what_and_the_limit_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(quantities, "free_memory", lambda: KEPT_FREE_BYTES + (256 << 20))
    with (
        pytest.raises(MemoryError, match=r"^trace.json needs more memory than is available; this process is limited"),
        held_to_free_memory(),
        memory_errors("the job"),
        memory_errors("trace.json"),
    ):
        assert len(bytearray(64 << 20)) == 64 << 20
        bytearray(4 << 30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
