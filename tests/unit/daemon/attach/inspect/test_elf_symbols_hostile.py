"""Hash tables of a hostile process, which lead round in circles or far away."""

import os
import struct

import pytest
from fuzz.targets.processes.image import small_image
from kinetod.attach.inspect.elf_symbols import Elf
from kinetod.attach.inspect.target_memory import TargetMemory

BASE = 0x10000
SYSV_CHAINS = 600 + 8 + 4  # behind the numbers of buckets and chains, and the only bucket
READS_MOST = 20_000


class Counted:
    """Memory that counts how often it is read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.reads = 0

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        data = self._data[address - BASE : address - BASE + size] if address >= BASE else b""
        if len(data) != size:
            raise OSError("unmapped")
        return data

    def u32(self, address: int) -> int:
        return int(struct.unpack("<I", self.read(address, 4))[0])


def test_a_chain_without_an_end_is_given_up_soon() -> None:
    data = bytearray(small_image(4))
    struct.pack_into("<I", data, SYSV_CHAINS + 4, 1)  # the first symbol's next one is itself
    memory = Counted(bytes(data))
    assert Elf(memory, BASE).lookup("no_such_name") is None
    assert memory.reads < READS_MOST


def test_an_image_of_the_fuzzer_is_a_good_one() -> None:
    for tag in (4, 0x6FFFFEF5):
        assert Elf(Counted(small_image(tag)), BASE).lookup("Py_Version") == (BASE + 0x100, 8)


@pytest.mark.parametrize("address", [-1, 1 << 63, (1 << 64) + 5])
def test_an_address_beyond_all_memory_is_unmapped(address: int) -> None:
    with pytest.raises(OSError, match="Unmapped"):
        TargetMemory(os.getpid()).read(address, 8)
