import pytest
from kineto_trace.decode import activity_names


@pytest.mark.parametrize(
    ("mangled", "plain"),
    [
        (b"_Z11scal_kernelIffEvT0_", "void scal_kernel<float, float>(float)"),
        (b"sm80_xmma_gemm", "sm80_xmma_gemm"),
        (b"_Znot mangled", "_Znot mangled"),
        (b"", ""),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"_Z" + b"1a" * 20_000, "_Z" + "1a" * 20_000),
    ],
)
def test_demangles_what_is_mangled(mangled: bytes, plain: str) -> None:
    assert activity_names.demangle(mangled) == plain


def test_the_versions_of_api_names_go() -> None:
    table = {211: b"cudaLaunchKernel_v7000", 1: b"cudaGetDevice", 2: b"cuMemcpy_v2_ptds"}
    assert activity_names.api_name(table, 211, "runtime") == "cudaLaunchKernel"
    assert activity_names.api_name(table, 1, "runtime") == "cudaGetDevice"
    assert activity_names.api_name(table, 2, "driver") == "cuMemcpy_v2_ptds"
    assert activity_names.api_name(table, 9, "driver") == "driver call 9"


def test_numbers_beyond_the_tables_have_names_too() -> None:
    assert activity_names.memcpy_name(77, 1, 200) == "Memcpy unknown 77 (Pageable -> unknown 200)"
    assert activity_names.memset_name(3) == "Memset (Device)"
    assert activity_names.sync_name(3) == "Stream Sync"
    assert activity_names.overhead_name(5 << 16) == "Lazy Function Loading"
    assert activity_names.overhead_name(99) == "Unrecognized"
