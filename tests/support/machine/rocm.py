"""The fake ROCm (tests/fakes/rocm): its libraries as files of one folder, as an installation has them."""

from pathlib import Path

from support.machine.native import FAKES, build

ROCM = FAKES / "rocm"
SDK_SOURCES = [
    ROCM / name
    for name in (
        "fake_rocprofiler.c",
        "fake_rocprofiler_buffers.c",
        "fake_rocprofiler_names.c",
        "fake_rocprofiler_trace.c",
    )
]
SHARED = ("-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROCM}")
# Versions of rocprofiler-sdk, each of which behaves differently or has other records than the one before.
VERSIONS = (10000, 10100, 10200, 10300, 10302, 10305, 10306, 10401)


def fake_rocprofiler(*flags: str, bare: bool = False) -> Path:
    """The fake rocprofiler-sdk. bare: with the name that it has in torch's wheels."""
    name = "librocprofiler-sdk.so" if bare else "librocprofiler-sdk.so.1"
    return build(name, SDK_SOURCES, [*SHARED, *flags, f"-Wl,-soname,{name}"])


def fake_hip(*flags: str) -> Path:
    """The fake libamdhip64."""
    return build("libamdhip64.so.7", [ROCM / "fake_hip.c"], [*SHARED, *flags, "-Wl,-soname,libamdhip64.so.7"])


def installed(folder: Path, *, bare: bool = False) -> Path:
    """Both libraries as an installation has them: in one folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for library in (fake_rocprofiler(bare=bare), fake_hip()):
        target = folder / library.name
        if not target.exists():
            target.symlink_to(library)
    return folder
