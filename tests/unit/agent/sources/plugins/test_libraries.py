"""A plug-in's library is loaded from memory, and no file of the program's is touched for it."""

import os
from pathlib import Path
from typing import List

import pytest
from kineto_agent.sources.plugins import libraries
from kineto_agent.sources.plugins.libraries import PluginLibraries
from kineto_agent.system import descriptors


def test_a_library_that_the_plug_in_does_not_have_is_named() -> None:
    with pytest.raises(OSError, match=r"the plug-in has no file libnone\.so"):
        PluginLibraries({}).load("libnone.so")


@pytest.mark.parametrize(
    "looks", [1, 2, 3, 4]
)  # the first one is when the memory is made; the last one is before dlopen
def test_a_file_of_the_program_under_the_memorys_number_is_not_written(
    looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_bytes(b"of the program")
    made: List[int] = []

    def memfd(name: str, flags: int) -> int:
        made.append(descriptors.memfd(name, flags))
        return made[0]

    seen: List[int] = []

    def identity(descriptor: int) -> descriptors.Identity:
        if len(seen) == looks:  # the program closes all descriptors and opens its file
            with own.open("r+b") as file:
                os.dup2(file.fileno(), made[0])
        seen.append(descriptor)
        return descriptors.identity(descriptor)

    monkeypatch.setattr(libraries, "_PIECE_BYTES", 4)
    monkeypatch.setattr(libraries, "memfd", memfd)
    monkeypatch.setattr(libraries, "identity", identity)
    with pytest.raises(OSError, match="the program has closed the descriptor"):
        PluginLibraries({"libtoy.so": b"0123456789ab"}).load("libtoy.so")
    assert own.read_bytes() == b"of the program"
    os.close(made[0])
