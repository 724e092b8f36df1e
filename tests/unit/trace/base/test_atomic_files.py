"""Files that are either whole or absent, on a disk that fills up in the middle of one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kineto_trace.base.atomic_files import atomic_file, write_atomically
from support.small_disk import small_disk


@pytest.fixture
def disk() -> Iterator[Path]:
    """64 KiB."""
    with small_disk("size=64k") as folder:
        yield folder


def test_what_does_not_fit_is_an_error_and_the_file_of_before_stays(disk: Path) -> None:
    write_atomically(disk / "target.json", b"whole")
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(disk / "target.json", bytes(100_000))
    assert [(each.name, each.read_bytes()) for each in disk.iterdir()] == [("target.json", b"whole")]


def test_whatever_is_left_a_table_is_whole_or_an_error(disk: Path) -> None:
    table = pa.table({"time": np.random.default_rng(1).integers(0, 2**60, 4000)})
    failed = 0
    for taken in range(0, 60_000, 4096):
        (disk / "taken").write_bytes(bytes(taken))
        try:
            with atomic_file(disk / "table.parquet") as file:
                pq.write_table(table, file)
        except OSError:
            failed += 1
            assert [each.name for each in disk.iterdir()] == ["taken"]
        else:
            assert pq.read_table(pa.BufferReader((disk / "table.parquet").read_bytes())) == table  # nothing stays open
            (disk / "table.parquet").unlink()
    assert 0 < failed < 15
