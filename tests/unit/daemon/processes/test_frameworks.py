"""The framework of a process, by the libraries that it maps."""

from pathlib import Path

import pytest
from kinetod.processes.frameworks import framework
from kinetod.processes.proc_folder import ProcessFolder

LINE = "7f0000000000-7f0000001000 r-xp 00000000 08:01 77 {}\n"


def found(proc: Path, *files: str, program: str = "") -> str:
    (proc / "7").mkdir(exist_ok=True)
    (proc / "7/maps").write_text("".join(map(LINE.format, files)))
    with ProcessFolder(7, proc) as folder:
        return framework(folder, program)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("/v/torch/lib/libtorch_cpu.so",), "torch"),
        (("/v/tensorflow/libtensorflow_framework.so.2", "/v/torch/lib/libtorch.so (deleted)"), "torch"),
        (("/v/jaxlib/xla_extension.so",), "jax"),
        (("/v/tensorflow/libtensorflow_framework.so.2",), "tensorflow"),
        (("/v/cupy/_core/core.cpython-312-x86_64-linux-gnu.so",), "cupy"),
        (("/v/lib/libtorchvision.so", "/v/numpy/_core/_multiarray_umath.so", "/usr/lib/libc.so.6"), ""),
        ((), ""),
    ],
)
def test_a_framework_is_known_by_its_libraries(tmp_path: Path, files: tuple[str, ...], expected: str) -> None:
    assert found(tmp_path, *files) == expected


def test_what_a_program_has_loaded_is_looked_for_until_it_is_there_and_then_remembered(tmp_path: Path) -> None:
    assert found(tmp_path, "/usr/lib/libc.so.6", program="first-run") == ""
    assert found(tmp_path, "/v/torch/lib/libtorch_cpu.so", program="first-run") == "torch"
    assert found(tmp_path, program="first-run") == "torch"
    assert found(tmp_path, program="another-run") == ""


def test_a_process_that_may_not_be_looked_at_has_none(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with ProcessFolder(7, tmp_path) as folder:
        assert framework(folder, "") == ""
