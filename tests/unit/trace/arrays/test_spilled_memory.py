"""Arrays in a file: the same numbers, in a process of their own, since numpy's memory is changed for good."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.arrays import spilled_memory
from support.waiting import scaled

pytestmark = pytest.mark.slow

BEGIN = """
import json, os, sys
from pathlib import Path
import numpy as np
from kineto_trace.arrays import spilled_memory
folder = Path(sys.argv[1])
(folder / "raw/cupti").mkdir(parents=True)
(folder / "raw/cupti/buffers.bin").write_bytes(bytes(4 << 20))
spilled_memory.POOL_FROM_BYTES = spilled_memory.SPILL_FROM_BYTES = 1 << 20
spilled_memory.RESIDENT_BYTES, spilled_memory.POOL_BYTES = int(sys.argv[2]), int(sys.argv[3])
spilled_memory._ROOM_BASE = 256 << 20
begun = spilled_memory.begin(folder)
def resident(): return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGESIZE")
def disk(): return os.fstat(descriptor).st_blocks * 512
descriptor = next(int(n) for n in os.listdir("/proc/self/fd") if "(deleted)" in os.readlink(f"/proc/self/fd/{n}"))
"""


def run(tmp_path: Path, code: str, resident: int = 1 << 40, pool: int = 0) -> Any:
    program = f"{BEGIN}\n{code}\nprint(json.dumps(said))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "target"), str(resident), str(pool)],
        capture_output=True, text=True, timeout=scaled(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_large_arrays_lie_on_disk_and_small_ones_do_not(tmp_path: Path) -> None:
    code = """
before = disk()
small, large = np.ones(1000), np.ones(4 << 20, np.uint8)
held = disk() - before
said = [begun, 4 << 20 <= held < 5 << 20, int(large.sum()) == 4 << 20]
"""
    assert run(tmp_path, code) == [True] * 3


def test_the_next_array_gets_the_place_on_disk_of_the_last_one(tmp_path: Path) -> None:
    code = """
before = disk()
for number in range(10):
    array = np.full(4 << 20, number, np.uint8); del array
said = disk() - before < 9 << 20
"""
    assert run(tmp_path, code) is True


def test_a_very_large_array_gives_its_place_on_disk_back(tmp_path: Path) -> None:
    code = """
before = disk()
array = np.empty(200 << 20, np.uint8); held = disk() - before
del array
said = [held >= 200 << 20, disk() - before < 1 << 20]
"""
    assert run(tmp_path, code) == [True, True]


def test_arrays_that_fit_into_the_pool_do_not_lie_on_disk(tmp_path: Path) -> None:
    code = """
before = disk()
for number in range(10):
    array = np.full(6 << 20, number, np.uint8); del array
pooled = disk() - before
array, further = np.ones(6 << 20, np.uint8), np.ones(6 << 20, np.uint8)
said = [pooled, disk() - before >= 6 << 20, int(array.sum()) + int(further.sum()) == 12 << 20]
"""
    assert run(tmp_path, code, pool=8 << 20) == [0, True, True]


POOLS = pytest.mark.parametrize("pool", [0, 8 << 20])


@POOLS
def test_what_is_freed_is_zero_when_it_is_taken_again(tmp_path: Path, pool: int) -> None:
    code = """
said = []
for _ in range(50):
    dirty = np.full(3 << 20, 255, np.uint8); del dirty
    said.append(int(np.zeros(3 << 20, np.uint8).sum()))
said = set(said) == {0}
"""
    assert run(tmp_path, code, pool=pool) is True


@POOLS
def test_arrays_of_all_sizes_keep_their_values(tmp_path: Path, pool: int) -> None:
    code = """
chance = np.random.default_rng(1)
kept = {}
for turn in range(400):
    if kept and chance.random() < 0.45:
        number, array = kept.popitem()
        assert (array == number).all()
    else:
        kept[turn] = np.full(int(chance.integers(1, 400_000)), turn, np.int64)
grown = np.arange(100_000)
for size in (200_000, 900_000, 50_000, 10):
    grown.resize(size, refcheck=False)
    assert (grown[:10] == np.arange(10)).all()
said = all((array == number).all() for number, array in kept.items())
"""
    assert run(tmp_path, code, pool=pool)


def test_resident_memory_stays_bounded_while_arrays_grow(tmp_path: Path) -> None:
    code = """
arrays = []
most = 0
for number in range(60):
    arrays.append(np.full(4 << 20, number, np.uint8))
    most = max(most, resident())
said = [most < 120 << 20, all(int(array[-1]) == number for number, array in enumerate(arrays))]
"""
    assert run(tmp_path, code, resident=100 << 20) == [True, True]


def test_one_pass_over_much_memory_stays_bounded_too(tmp_path: Path) -> None:
    code = """
array = np.empty(300 << 20, np.uint8)
array[:] = 1
array += 1
status = Path("/proc/self/status").read_text()
peak = next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmHWM"))
said = [peak < 230, int(array[::4096].sum()) == 2 * (300 << 8)]
"""
    assert run(tmp_path, code, resident=100 << 20) == [True, True]


def test_what_has_no_room_in_the_file_lies_in_memory(tmp_path: Path) -> None:
    code = """
before = disk()
arrays = [np.full(1 << 20, number % 256, np.uint8) for number in range(400)]
said = [disk() - before < 321 << 20, all(int(array[-1]) == number % 256 for number, array in enumerate(arrays))]
"""
    assert run(tmp_path, code) == [True, True]  # the file has 256 MiB and 16 times its 4 MiB of records


def test_what_fits_nowhere_is_a_memory_error(tmp_path: Path) -> None:
    code = """
try: said = np.empty(1 << 40, np.uint8).size
except MemoryError: said = "MemoryError"
"""
    assert run(tmp_path, code) == "MemoryError"


@pytest.mark.parametrize("raw", [0, spilled_memory.POOL_FROM_BYTES - 1])
def test_few_records_are_decoded_in_plain_memory(tmp_path: Path, raw: int) -> None:
    (tmp_path / "raw/cupti").mkdir(parents=True)
    with (tmp_path / "raw/cupti/buffers.bin").open("wb") as file:
        file.truncate(raw)
    assert not spilled_memory.begin(tmp_path)
    assert not spilled_memory._kept
