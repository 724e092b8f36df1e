"""Which files of a process are looked at for device code that launches graphs."""

import time
from pathlib import Path

import pytest
from kinetod.attach.inspect import device_graph_code
from kinetod.attach.inspect.process_inspection import mapped_paths
from support.machine.device_code import LAUNCHING, fatbin, program

WITH = program(fatbin(LAUNCHING))


def process(folder: Path, files: dict[str, bytes]) -> Path:
    """A /proc in which process 7 maps these files, of which the first is its program."""
    root = folder / "7" / "root"
    for path, content in files.items():
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    lines = [f"7f00-7f01 r-xp 00000000 00:01 1 {' ' * 20} {path}\n" for path in files]
    (folder / "7" / "maps").write_text("".join(lines))
    (folder / "7" / "exe").symlink_to(f"{root}{next(iter(files))}")
    return folder


def test_the_program_itself(tmp_path: Path) -> None:
    found = device_graph_code.find(7, process(tmp_path, {"/opt/server": WITH}))
    assert found.endswith("/opt/server")


def test_a_library_is_named_as_the_process_sees_it(tmp_path: Path) -> None:
    files = {"/usr/bin/python3": b"", "/usr/lib/libm.so.6": b"", "/home/me/ext.cpython-311.so": WITH}
    assert device_graph_code.find(7, process(tmp_path, files)) == "/home/me/ext.cpython-311.so"


@pytest.mark.parametrize(
    "path",
    ["/site/torch/lib/libtorch_cuda.so", "/site/torch/lib/ours.so", "/site/nvidia/cu13/lib/libother.so.1",
     "/site/jaxlib/x.so", "/usr/lib/libcublas.so.13", "/usr/lib/libnccl.so.2", "/usr/lib/libcublasLt.so.12.9.1",
     "/usr/lib/libnvidia-ptxjitcompiler.so.580.1", "/usr/lib/libnvrtc-builtins.so.13.0",
     "/usr/lib/libcudnn_engines_precompiled.so.9", "/data/weights.bin"],
)  # fmt: skip
def test_libraries_of_vendors_and_frameworks_and_other_files_are_left_out(path: str, tmp_path: Path) -> None:
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": b"", path: WITH})) == ""


@pytest.mark.parametrize("name", ["libcustom.so", "libcuda_kernels.so", "libnv_ours.so.2", "libc10d_ours.so"])
def test_a_library_of_the_programs_own_with_a_similar_name_is_looked_at(name: str, tmp_path: Path) -> None:
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": b"", f"/opt/{name}": WITH})) == f"/opt/{name}"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    proc = process(tmp_path, {"/opt/server": b"", "/opt/gone.so": b"", "/opt/ours.so": WITH})
    (tmp_path / "7/root/opt/gone.so").unlink()
    assert device_graph_code.find(7, proc) == "/opt/ours.so"
    assert device_graph_code.find(8, proc) == ""


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def note(descriptor: int) -> bool:
        reads.append(descriptor)
        return False

    monkeypatch.setattr(device_graph_code, "launches_graphs", note)
    proc = process(tmp_path, {"/opt/server": b"1"})
    assert (device_graph_code.find(7, proc), device_graph_code.find(7, proc), len(reads)) == ("", "", 1)
    (tmp_path / "7/root/opt/server").write_bytes(b"12")
    assert (device_graph_code.find(7, proc), len(reads)) == ("", 2)


def test_time_in_which_a_busy_host_runs_somebody_else_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: Path) -> list[str]:
        time.sleep(1.5 * device_graph_code.BUDGET_S)
        return list(mapped_paths(folder))

    monkeypatch.setattr(device_graph_code, "mapped_paths", late)
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": WITH})).endswith("/opt/server")


def test_no_file_is_opened_after_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_graph_code, "BUDGET_S", -1.0)
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": WITH})) == ""
