"""The version of a libcupti is read from its code, in memory or in its file."""

from pathlib import Path

import pytest
from kineto_agent.sources.cupti import libcupti
from kineto_agent.sources.cupti.known_versions import RELEASES
from kinetod.attach.inspect import cupti_search
from kinetod.attach.inspect.target_image import TargetImage
from support.machine import native
from support.service import subjects

SOURCE = """
static unsigned set_it(unsigned *version) { *version = %d; return 0; }
unsigned cuptiGetVersion(unsigned *version) { if (!version) return 1; return set_it(version); }
unsigned other = 1;
"""


def library(folder: Path, version: int) -> Path:
    source, path = folder / "cupti.c", folder / "libcupti.so.13"
    source.write_text(SOURCE % version)
    return native.build(path.name, [source], ["-O2", "-fPIC", "-shared"])


@pytest.mark.parametrize("version", [22, max(RELEASES)])
def test_in_a_file_and_in_memory(tmp_path: Path, version: int) -> None:
    path = library(tmp_path, version)
    assert cupti_search.version_in_file(path) == version
    with subjects.python(f"import ctypes; ctypes.CDLL({str(path)!r})") as pid:
        image = TargetImage(pid)
        function = image.symbol_in(("libcupti.so",), cupti_search.FUNCTION)
        assert function is not None
        assert cupti_search.version_in_memory(image.memory, function) == version


def test_what_is_no_libcupti_has_no_version(tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF" + bytes(100), b"text" * 100):
        path = tmp_path / "libcupti.so"
        path.write_bytes(content)
        assert cupti_search.version_in_file(path) is None
    assert cupti_search.version_in_file(tmp_path) is None
    assert cupti_search.version_in_file(tmp_path / "missing") is None
    assert cupti_search.version_in_file(Path(subjects.SLEEP)) is None


def test_the_newest_wheels_come_before_older_ones_and_toolkits(tmp_path: Path) -> None:
    paths = [
        "usr/local/cuda/extras/CUPTI/lib64/libcupti.so.12",
        "site/nvidia/cuda_cupti/lib/libcupti.so.12",
        "site/nvidia/cu13/lib/libcupti.so.13",
    ]
    found = []
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
        chosen = libcupti.installed(["/site"], {}, str(tmp_path))
        assert chosen is not None
        found.append(chosen.lstrip("/"))
    assert found == paths
    assert libcupti.installed([], {"CUDA_HOME": "/opt/cuda"}, str(tmp_path / "empty")) is None
