"""Values on the command line."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kinetoctl.base import value_types
from kinetoctl.base.value_types import removable_folder
from support.waiting import scaled, until

NOW_NS = 1_700_000_000_000_000_000


RANKS, GPUS = r"expected (ranks like|at most 1,000,000 ranks)", r"expected (GPUs like 0,2-3, got|at most 1,024 GPUs)"
WEEK = r"expected at most 24h, got .*: a longer trace would not fit on a disk"


@pytest.mark.parametrize(
    ("parse", "texts", "why"),
    [
        (value_types.parse_positive_duration_ns, ["0s", "-5s", "0.1ns"], "expected a duration above zero"),
        (value_types.parse_positive_duration_ns, ["7d", "168h", "24.1h"], WEEK),
        (value_types.parse_delay_ns, ["-1s"], "expected a duration of zero or more, got '-1s'"),
        (value_types.parse_positive_size_bytes, ["big", "0MiB", "-1GiB"], "expected a size"),
        (
            value_types.parse_ranks,
            ["", "a", "1-", "3-1", "-2", "0-9999999", "1,,2", "all"],
            RANKS,
        ),  # all: files of a merge
        (value_types.parse_gpus, ["", "GPU-0", "all", "2-1", "0-1024", "\N{ARABIC-INDIC DIGIT ONE}"], GPUS),
    ],
    ids=["durations", "weeks", "delays", "sizes", "ranks", "gpus"],
)
def test_other_texts_are_refused_with_the_reason(parse: Callable[[str], object], texts: list[str], why: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=why):
            parse(text)


def test_durations_sizes_ranks_and_gpus_are_read() -> None:
    assert value_types.parse_delay_ns("0s") == 0
    assert value_types.parse_positive_size_bytes("256MiB") == 268_435_456
    assert value_types.parse_ranks("0, 8-11,9") == (0, 8, 9, 10, 11)
    assert value_types.parse_gpus("3,0-1") == (0, 1, 3)


def test_the_word_all_means_whatever_rank() -> None:
    assert value_types.parse_ranks_or_all("all") == (-1,)
    assert value_types.parse_ranks_or_all("0,8-9") == (0, 8, 9)


def test_a_container_is_its_id_as_docker_or_kubernetes_shows_it() -> None:
    digits = "4f" * 32
    assert value_types.parse_container_id(digits[:12]) == digits[:12]
    assert value_types.parse_container_id(f"containerd://{digits}") == digits
    for text in ("4f4f4f4f4f4", digits + "0", "trainer"):
        with pytest.raises(ValueError, match="expected a container's id of 12 to 64 hexadecimal digits, got"):
            value_types.parse_container_id(text)


def test_a_pod_is_named_by_its_uid() -> None:
    uid = "8f2c1a90-7b3d-4e21-9a55-0c1d2e3f4a5b"
    assert value_types.parse_pod_uid(uid) == uid
    with pytest.raises(ValueError, match=r"got 'llama-0'; `kubectl get pod NAME -o jsonpath=\{\.metadata\.uid\}`"):
        value_types.parse_pod_uid("llama-0")


def test_a_label_is_split_at_the_first_equals_sign() -> None:
    assert value_types.parse_label("a=b=c") == ("a", "b=c")
    with pytest.raises(ValueError, match="expected a label like team=vision, got '=x'"):
        value_types.parse_label("=x")


def test_activities_are_a_comma_separated_list() -> None:
    assert value_types.parse_activities("kernel, gpu_memcpy") == ("kernel", "gpu_memcpy")
    with pytest.raises(ValueError, match="expected activity types like kernel,gpu_memcpy, got 'kernel;'"):
        value_types.parse_activities("kernel;")


def test_a_start_is_relative_or_a_time() -> None:
    assert value_types.parse_start_ns("+10s", lambda: NOW_NS) == NOW_NS + 10_000_000_000
    assert value_types.parse_start_ns("2030-01-31T12:00:00.250000+00:00", lambda: NOW_NS) == 1_896_091_200_250_000_000


def test_a_start_in_the_past_or_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a start time in the future, got '2001-01-01T00:00:00'"):
        value_types.parse_start_ns("2001-01-01T00:00:00", lambda: NOW_NS)
    with pytest.raises(ValueError, match=r"expected a start time like \+10s or 2030-01-31T12:00:00, got 'later'"):
        value_types.parse_start_ns("later", lambda: NOW_NS)


def test_a_regex_has_to_compile() -> None:
    assert value_types.parse_regex("train.*py") == "train.*py"
    with pytest.raises(ValueError, match=r"expected a regular expression, got '\('"):
        value_types.parse_regex("(")
    with pytest.raises(ValueError, match="got an empty one"):
        value_types.parse_regex("")


FOLDERS = 30


def test_a_folder_and_what_is_in_it_exist_for_the_duration_of_the_block(tmp_path: Path) -> None:
    with removable_folder("some-", tmp_path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner/file").write_text("x")
        assert folder.parent == tmp_path
        assert folder.name.startswith("some-")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_while_a_thread_goes_on_writing(tmp_path: Path) -> None:
    for _ in range(FOLDERS):
        failed: list[OSError] = []

        def write(folder: Path, failed: list[OSError] = failed) -> None:
            number = 0
            try:
                while True:
                    (folder / str(number)).mkdir()
                    (folder / str(number) / "file").write_text("x")
                    number += 1
            except OSError as exc:
                failed.append(exc)

        with removable_folder("some-", tmp_path) as folder:
            writer = threading.Thread(target=write, args=(folder,))
            writer.start()
            until((folder / "20").exists, "the thread writes")
        writer.join(scaled(10.0))
        assert len(failed) == 1
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_else_has_removed_is_no_failure(tmp_path: Path) -> None:
    with removable_folder("some-", tmp_path) as folder:
        folder.rmdir()
    assert list(tmp_path.iterdir()) == []
