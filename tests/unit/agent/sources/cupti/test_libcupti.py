"""Which libcupti is used."""

from pathlib import Path

from kineto_agent.sources.cupti import libcupti

LINE = "7f00000000-7f00001000 r-xp 00000000 fe:00 1234   "


def maps(tmp_path: Path, *paths: str) -> str:
    file = tmp_path / "maps"
    file.write_text("".join(f"{LINE}{path}\n" for path in ("/lib/libc.so.6", "[heap]", *paths)))
    return str(file)


def test_the_loaded_copy_is_used_by_its_full_path(tmp_path: Path) -> None:
    file = maps(tmp_path, "/site/nvidia/cu13/lib/libcupti.so.13", "/site/nvidia/cu13/lib/libcupti.so.13")
    assert libcupti.find({}, file, []) == "/site/nvidia/cu13/lib/libcupti.so.13"


def test_without_cuda_there_is_nothing_to_trace(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia/cuda_cupti/lib"
    wheel.mkdir(parents=True)
    (wheel / "libcupti.so.12").touch()
    assert libcupti.find({}, maps(tmp_path), [str(tmp_path)]) is None


def test_with_cuda_but_no_cupti_loaded_the_wheel_is_found(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia/cuda_cupti/lib"
    wheel.mkdir(parents=True)
    (wheel / "libcupti.so.12").touch()
    file = maps(tmp_path, "/usr/lib/libcuda.so.580.1")
    assert libcupti.find({}, file, ["", str(tmp_path)]) == str(wheel / "libcupti.so.12")


def test_the_wheel_of_cuda_13_comes_first(tmp_path: Path) -> None:
    for folder, name in (("cuda_cupti", "libcupti.so.12"), ("cu13", "libcupti.so.13")):
        (tmp_path / "nvidia" / folder / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / folder / "lib" / name).touch()
    file = maps(tmp_path, "/usr/lib/libcuda.so.1")
    assert libcupti.find({}, file, [str(tmp_path)]) == str(tmp_path / "nvidia/cu13/lib/libcupti.so.13")


def test_a_toolkit_is_found_by_its_variable(tmp_path: Path) -> None:
    library = tmp_path / "extras/CUPTI/lib64/libcupti.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    file = maps(tmp_path, "/usr/lib/libcuda.so.1")
    assert libcupti.find({"CUDA_HOME": str(tmp_path)}, file, []) == str(library)


def test_the_variable_overrides_everything(tmp_path: Path) -> None:
    file = maps(tmp_path, "/site/libcupti.so.13")
    assert libcupti.find({"KINETO_CUPTI_LIBRARY": "/mine/libcupti.so"}, file, []) == "/mine/libcupti.so"
