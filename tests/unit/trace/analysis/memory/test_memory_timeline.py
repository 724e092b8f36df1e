import gzip
import json
from pathlib import Path

import pytest
from kineto_trace.analysis.memory.memory_timeline import memory_timeline
from kineto_trace.errors import FileError

PARAMETER, ACTIVATION, UNKNOWN = 0, 4, 7


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "memory.raw.json.gz"


def test_bytes_of_each_category_add_up_over_time(file: Path) -> None:
    # 100 bytes of parameters were there before; at 50 activations grow by 30 and 4; at 70 they shrink by 30
    rows = [[-1, 0, 100, PARAMETER], [50, 1, 30, ACTIVATION], [50, 1, 4, ACTIVATION], [70, 3, -30, ACTIVATION]]
    file.write_bytes(gzip.compress(json.dumps(rows).encode()))
    found = memory_timeline(file)
    assert found.values("time_ns") == [50, 50, 70]
    assert found.values("time_us") == [0, 0, 0.02]
    assert found.values("parameter_bytes") == [100, 100, 100]
    assert found.values("activation_bytes") == [0, 34, 4]
    assert found.values("total_bytes") == [100, 134, 104]


def test_a_file_may_be_plain_or_empty(file: Path) -> None:
    file.write_text(f"[[5, 1, 7, {UNKNOWN}]]")
    assert memory_timeline(str(file)).values("unknown_bytes") == [7]
    file.write_text("[]")
    assert len(memory_timeline(file)) == 0


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "[[1, 2, 3]]", '[[1, 2, 3, "x"]]', "[[1, 2, 3, 99]]", "", "[[1, 1.5, 2, 3]]"]
)
def test_other_files_are_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(FileError, match=r"memory timeline"):
        memory_timeline(file)


def test_a_damaged_file_is_told_of(file: Path) -> None:
    file.write_bytes(gzip.compress(b"[[1,2,3,4]]" * 50)[:-12])
    with pytest.raises(FileError, match="damaged"):
        memory_timeline(file)
