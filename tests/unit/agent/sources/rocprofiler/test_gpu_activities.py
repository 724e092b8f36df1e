"""AMD GPU activities against the fake ROCm, in processes of their own."""

from pathlib import Path

import pytest
from support.rocm.child import run_child
from support.rocm.fakes import VERSIONS, fake_kineto

LATE = [version for version in VERSIONS if version >= 10300 and version != 10302]
RUN = """
hip = Hip(HIP, True)
hip.launch(10)
answer["types"] = source.activity_types()
answer["first"] = recorded(lambda: hip.launch(2000))
answer["second"] = recorded(lambda: hip.launch(100), "kernel")
answer["status"] = status()
answer["active"], answer["misused"] = sdk().fake_rocprofiler_active(), sdk().fake_rocprofiler_misused()
"""
LAUNCHES = {"11": 2000, "10": 2, "60": 2008}  # two copies, and two waits after each batch and at the end


@pytest.mark.parametrize("version", LATE)
def test_a_process_that_nobody_prepared_is_recorded_at_any_time(version: int, tmp_path: Path) -> None:
    answer = run_child(tmp_path, RUN, version=version)
    assert "kernel" in answer["types"]
    assert answer["first"]["kinds"] == LAUNCHES
    assert answer["first"]["texts"] == ["_Z5firsti", "_Z6secondi"]  # loaded before: named by their launches
    assert answer["second"]["kinds"] == {"11": 100, "60": 102}
    for recording in (answer["first"], answer["second"]):
        assert (recording["warnings"], recording["incomplete"], recording["dropped"]) == ([], "", 0)
    assert answer["status"]["variables"] == []  # of rocprofiler's, which children would inherit
    assert (answer["active"], answer["misused"]) == (1, 0)  # what listens to the loading of kernels


def test_the_metadata_has_versions_and_devices(tmp_path: Path) -> None:
    metadata = run_child(tmp_path, RUN, version=10305)["first"]["metadata"]
    assert metadata["rocprofiler_version"] == 10305
    assert metadata["rocprofiler_library"] == str(tmp_path / "librocprofiler-sdk.so.1")
    assert [agent["ordinal"] for agent in metadata["agents"] if agent["gpu"]] == [0, 1]
    assert metadata["devices"][1] == {
        "id": 1, "pci_bus_id": "0000:c0:00.0", "name": "AMD Instinct MI300X", "totalGlobalMem": 206141652992,
        "maxThreadsPerMultiprocessor": 2048,
        "warpSize": 64, "sharedMemPerBlock": 65536, "numSms": 304, "arch": "gfx942",
    }  # fmt: skip


def test_the_library_of_torchs_wheels_has_another_name(tmp_path: Path) -> None:
    answer = run_child(tmp_path, RUN, bare=True, version=10305)
    assert answer["first"]["kinds"] == LAUNCHES
    assert answer["first"]["metadata"]["rocprofiler_library"] == str(tmp_path / "librocprofiler-sdk.so")


REFUSED = """
hip = Hip(HIP, True)
answer["types"] = source.activity_types()
answer["code"], answer["reason"] = refused()
answer["kernels"] = hip.launch(10)["kernels"]
answer["clients"] = sdk().fake_rocprofiler_clients()
"""


@pytest.mark.parametrize(
    ("version", "code"),
    [
        (10200, "ROCPROFILER_TOO_LATE"),
        (10302, "ROCPROFILER_HANGS"),
        (600, "ROCPROFILER_UNKNOWN_VERSION"),
        (10500, "ROCPROFILER_UNKNOWN_VERSION"),
    ],
)
def test_where_recording_would_harm_or_fail_it_is_refused_before_anything_is_configured(
    version: int, code: str, tmp_path: Path
) -> None:
    answer = run_child(tmp_path, REFUSED, version=version)
    assert (answer["code"], answer["clients"]) == (code, 0)
    assert "kernel" in answer["types"]  # so that whoever asks is told why


def test_kinds_that_are_numbered_otherwise_are_refused(tmp_path: Path) -> None:
    answer = run_child(tmp_path, REFUSED, version=10305, shifted_kinds=1)
    assert answer["code"] == "ROCPROFILER_LIBRARY"
    assert (
        "numbers its records in a way that this agent does not know: kind 5 is HSA_FINALIZE_EXT_API there"
        in (answer["reason"])
    )
    assert answer["clients"] == 0


EARLY = """
ctypes.CDLL(HIP, ctypes.RTLD_GLOBAL)
hip = []
answer["first"] = recorded(lambda: hip.append(Hip(HIP, True)) or hip[0].launch(100))
answer["second"] = recorded(lambda: hip[0].launch(100))
answer["status"] = status()
"""


@pytest.mark.parametrize("version", [10000, 10200, 10300])
def test_before_hip_has_initialised_any_version_records(version: int, tmp_path: Path) -> None:
    answer = run_child(tmp_path, EARLY, version=version)
    assert answer["first"]["kinds"]["11"] == answer["second"]["kinds"]["11"] == 100
    assert answer["first"]["texts"] == ["_Z5firsti", "_Z5firsti.kd", "_Z6secondi", "_Z6secondi.kd"]
    (warning,) = answer["first"]["warnings"]
    assert "has set ROCPROFILER_REGISTER_FORCE_LOAD and ROCPROFILER_REGISTER_LIBRARY" in warning
    assert answer["second"]["warnings"] == []
    assert len(answer["status"]["variables"]) == 2  # HIP needed them to find rocprofiler


BESIDE_KINETO = """
kineto = ctypes.CDLL(KINETO, ctypes.RTLD_GLOBAL)
kineto.fake_kineto_end.restype = ctypes.c_uint64
hip = Hip(HIP, True)
answer["code"], answer["reason"] = refused()
if not answer["code"]:
    assert kineto.fake_kineto_begin() == 0
    answer["ours"] = recorded(lambda: hip.launch(1000))
    hip.launch(10)
    answer["theirs"] = kineto.fake_kineto_end()
    answer["clients"] = sdk().fake_rocprofiler_clients()
"""


@pytest.mark.parametrize("version", [10000, 10200, 10300])
def test_beside_a_client_that_came_first_older_versions_are_locked(version: int, tmp_path: Path) -> None:
    answer = run_child(tmp_path, f"KINETO = {str(fake_kineto())!r}\n" + BESIDE_KINETO, version=version)
    assert answer["code"] == "ROCPROFILER_LOCKED"
    assert "accepts no more clients; 1.3.2 and later do" in answer["reason"]


@pytest.mark.parametrize("version", [10305, 10401])
def test_beside_a_client_that_came_first_newer_versions_serve_both(version: int, tmp_path: Path) -> None:
    answer = run_child(tmp_path, f"KINETO = {str(fake_kineto())!r}\n" + BESIDE_KINETO, version=version)
    assert (answer["ours"]["kinds"]["11"], answer["theirs"], answer["clients"]) == (1000, 1010, 2)
    assert answer["ours"]["texts"] == ["_Z5firsti", "_Z6secondi"]


def test_where_rocprofiler_is_locked_and_torch_can_record_it_is_left_to_torch(tmp_path: Path) -> None:
    code = (
        f"KINETO = {str(fake_kineto())!r}\n"
        + """
from types import SimpleNamespace
ctypes.CDLL(KINETO, ctypes.RTLD_GLOBAL)
hip = Hip(HIP, True)
answer["before"] = source.activity_types()
sys.modules["torch"] = SimpleNamespace(version=SimpleNamespace(hip="7.0"))
sys.modules["torch.cuda"] = SimpleNamespace(_initialized=True)
answer["after"] = source.activity_types()
"""
    )
    locked = run_child(tmp_path, code, version=10200)
    assert ("kernel" in locked["before"], locked["after"]) == (True, [])
    assert "kernel" in run_child(tmp_path, code, version=10305)["after"]


def test_a_record_of_unknown_size_makes_the_recording_incomplete(tmp_path: Path) -> None:
    code = "hip = Hip(HIP, True)\nanswer.update(recorded(lambda: hip.launch(10)))"
    answer = run_child(tmp_path, code, version=10305, extra_dispatch_bytes=16)
    assert "11" not in answer["kinds"]
    assert answer["incomplete"] == (
        "10 records were left out: this rocprofiler-sdk writes records of kind 11 with 200 bytes, which is not a size "
        "that this agent knows"
    )


def test_calls_that_are_not_seen_again_are_missed(tmp_path: Path) -> None:
    answer = run_child(tmp_path, RUN, version=10305, deaf_again=1)
    assert answer["first"]["incomplete"] == ""
    assert answer["second"]["incomplete"] == (
        "rocprofiler-sdk told of 100 kernels, but of no call of HIP's: they have no launches, and queues in place of "
        "streams"
    )


def test_allocations_and_hsa_are_recorded_on_request_only(tmp_path: Path) -> None:
    code = """
hip = Hip(HIP, True)
answer["on_request"] = sorted(source.on_request)
memory = ctypes.c_void_p()
def allocate():
    hip.library.hipMalloc(ctypes.byref(memory), ctypes.c_size_t(4096))
    hip.library.hipFree(memory)
answer["asked"] = recorded(allocate, "rocm_memory")["kinds"]
answer["not"] = recorded(allocate, "kernel")["kinds"]
"""
    answer = run_child(tmp_path, code, version=10305)
    assert answer["on_request"] == ["cuda_driver", "rocm_memory", "rocm_scratch"]
    assert answer["asked"] == {"16": 2}
    assert answer["not"] == {"60": 2}  # the calls alone, which may stop the device


def test_a_forked_child_is_left_alone(tmp_path: Path) -> None:
    code = """
hip = Hip(HIP, True)
def act():
    hip.launch(10)
    child = os.fork()
    if child == 0:
        hip.library.hipModuleLaunchKernel(hip.functions[0], 1, 1, 1, 1, 1, 1, 0, None, None, None)
        os._exit(0 if refused()[0] == "ROCPROFILER_FORKED" and sdk().fake_rocprofiler_misused() == 0 else 1)
    answer["child"] = os.waitpid(child, 0)[1]
answer["kinds"] = recorded(act)["kinds"]
"""
    answer = run_child(tmp_path, code, version=10305)
    assert (answer["child"], answer["kinds"]["11"]) == (0, 10)


def test_a_busy_buffer_is_asked_again(tmp_path: Path) -> None:
    code = "hip = Hip(HIP, True)\nanswer.update(recorded(lambda: hip.launch(10)))"
    answer = run_child(tmp_path, code, version=10305, busy_flushes=5)
    assert (answer["kinds"]["11"], answer["warnings"]) == (10, [])


def test_a_process_that_exits_while_it_is_recorded_says_nothing(tmp_path: Path) -> None:
    code = """
hip = Hip(HIP, True)
session = source.prepare(request())
session.start()
hip.launch(100)
"""
    assert run_child(tmp_path, code, version=10305) == {}
