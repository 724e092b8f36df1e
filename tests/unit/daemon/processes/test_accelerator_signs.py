"""Which plug-ins' signs a process shows to whoever looks from outside."""

from pathlib import Path

import pytest
from kineto_agent.protocol.plugin_bundle import Signs
from kinetod.processes.accelerator_signs import OutsideSigns, outside, shown
from kinetod.processes.identity import ProcessFolder

MAPS = b"""\
7f0000000000-7f0000001000 r-xp 00000000 08:01 42   /opt/pebble/libpebble.so.2 (deleted)
7f0000001000-7f0000002000 rw-p 00000000 00:00 0    [heap]
7f0000002000-7f0000003000 r-xp 00000000 08:01 43   /usr/lib/libtin.so-not
"""


@pytest.fixture
def process(tmp_path: Path) -> ProcessFolder:
    folder = tmp_path / "7"
    (folder / "fd").mkdir(parents=True)
    (folder / "maps").write_bytes(MAPS)
    (folder / "environ").write_bytes(b"PEBBLE_MODE=train\0PEBBLE=\0\xff=1\0")
    (folder / "fd" / "3").symlink_to("/dev/pebble0")
    return ProcessFolder(7, tmp_path)


@pytest.mark.parametrize(
    ("signs", "is_shown"),
    [
        (Signs(libraries=("libpebble.so*",)), True),
        (Signs(libraries=("libnone.so", "libpebble.so.[0-9]")), True),
        (Signs(libraries=("libtin.so",)), False),
        (Signs(libraries=("libPEBBLE.so*",)), False),
        (Signs(libraries=("heap*",)), False),
        (Signs(environment=("PEBBLE",)), True),
        (Signs(environment=("PEBBLE_HOME",)), False),
        (Signs(environment=("PEBBLE_MODE=idle",)), True),  # by now it may have that value
        (Signs(libraries=("libpebble.so*",), environment=("PEBBLE_HOME",)), False),
        (Signs(libraries=("libpebble.so*",), environment=("PEBBLE_HOME", "PEBBLE")), True),
        (Signs(libraries=("libpebble.so*",), modules=("pebble",), device_files=("/dev/none",)), True),
        (Signs(device_files=("/dev/pebble[0-9]*",)), True),
        (Signs(device_files=("/dev/null",)), False),  # that is there, but not open
    ],
)
def test_each_kind_that_is_seen_must_have_a_match(process: ProcessFolder, signs: Signs, is_shown: bool) -> None:
    other = OutsideSigns("other", libraries=("libpebble*",))
    assert shown(process, "", [outside("pebble", signs), other]) == (("pebble", "other") if is_shown else ("other",))


def test_modules_alone_are_not_seen_from_outside(process: ProcessFolder) -> None:
    signs = outside("pebble", Signs(modules=("torch_pebble",)))
    assert not signs
    assert shown(process, "", [signs]) == ()


def test_what_may_not_be_read_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "8").mkdir()
    signs = (
        OutsideSigns("a", libraries=("*",)),
        OutsideSigns("b", variables=("A",)),
        OutsideSigns("c", open_files=("*",)),
    )
    with ProcessFolder(8, tmp_path) as folder:
        assert shown(folder, "", signs) == ()


def test_a_map_is_read_again_once_the_address_space_has_changed(tmp_path: Path) -> None:
    folder, program = tmp_path / "9", "0" * 32
    folder.mkdir()
    signs = [OutsideSigns("pebble", libraries=("libpebble.so*",))]

    def look() -> tuple[str, ...]:
        with ProcessFolder(9, tmp_path) as opened:
            return shown(opened, program, signs)

    (folder / "statm").write_bytes(b"100 1 1 1 0 1 0\n")
    assert look() == ()  # its map cannot be read
    (folder / "maps").write_bytes(b"")
    assert look() == ()
    (folder / "maps").write_bytes(MAPS)
    assert look() == ()
    (folder / "statm").write_bytes(b"101 1 1 1 0 1 0\n")
    assert look() == ("pebble",)
    program = "1" * 32
    (folder / "maps").write_bytes(b"")
    assert look() == ()
