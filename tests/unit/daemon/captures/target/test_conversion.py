from pathlib import Path

from kinetod.captures.target.conversion import remove_outputs


def test_of_a_decoder_that_failed_only_the_raw_records_stay(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "buffers.bin").write_bytes(b"records")
    (tmp_path / "target.json").write_text("{}")
    for half in ("trace.json.gz", ".trace.json.gz.tmp"):
        (tmp_path / half).write_bytes(b"half")
    (tmp_path / "columns").mkdir()
    (tmp_path / "columns" / "kernel.parquet").write_bytes(b"half")
    assert remove_outputs(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "raw",
        "raw/buffers.bin",
        "target.json",
    ]


def test_a_folder_that_was_removed_has_no_raw_records(tmp_path: Path) -> None:
    assert not remove_outputs(tmp_path / "gone")
