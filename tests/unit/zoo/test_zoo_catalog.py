import re
from functools import partial

from gpu.zoo import catalog, toolchain

PROGRAMS = catalog.load()
ZOO = [program for program in PROGRAMS.values() if not program.stand_in]


def test_the_zoo_is_large_and_much_of_it_replays_graphs() -> None:
    assert len(ZOO) >= 70
    assert sum(program.graphs for program in ZOO) >= 25


def test_every_program_is_a_function_or_a_mode_of_a_native_source() -> None:
    for program in ZOO:
        if program.run is not None:
            assert isinstance(program.run, partial) or program.run.__name__ == program.name
            continue
        source = (toolchain.NATIVE / f"{program.source}.cu").read_text()
        usage = re.search(rf"usage: {program.source} (\S+) FOLDER", source)
        assert usage is not None
        assert set(program.arguments) <= set(usage[1].split("|"))


def test_every_mode_of_a_native_source_is_a_program() -> None:
    used = {(program.source, *program.arguments) for program in ZOO}
    for path in toolchain.NATIVE.glob("*.cu"):
        usage = re.search(rf"usage: {path.stem} (\S+) FOLDER", path.read_text())
        assert usage is not None
        assert {(path.stem, mode) for mode in usage[1].split("|")} <= used


def test_programs_end_in_known_ways() -> None:
    assert {program.end for program in PROGRAMS.values()} == {"file", "term", "self"}


def test_fifty_programs_capture_graphs_all_the_time_and_ten_have_kernels_that_do_not_end() -> None:
    named = [program for program in ZOO if program.by_name]
    assert sum(program.name.startswith("capture_") for program in named) == 50
    assert sum(program.name.startswith("hold_") for program in named) >= 10
