"""What to run to install a missing package."""

import json
from pathlib import Path

import pytest
from kineto_trace.base import install_advice as subject
from kineto_trace.base.install_advice import install_advice, reinstall_advice

PYTHON = "/v/bin/python3"


def built_by_us(prefix: Path, *, packaged: bool) -> Path:
    """The environment of our packages and image, which has no pip."""
    for name in ("share/sbom/kinetod.cdx.json", *(["share/doc/kinetod/README.md"] if packaged else [])):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).touch()
    return prefix


def again(origin: object, prefix: Path) -> str:
    return reinstall_advice(prefix=prefix, python=PYTHON, origin=lambda: json.dumps(origin) if origin else None)


def test_a_package_is_installed_for_the_python_that_misses_it(tmp_path: Path) -> None:
    assert install_advice("s3fs", prefix=tmp_path, python=PYTHON) == "run /v/bin/python3 -m pip install s3fs"
    spaced = install_advice("-U s3fs", prefix=tmp_path, python="/my v/python3")
    assert spaced == "run '/my v/python3' -m pip install -U s3fs"


def test_an_environment_of_uv_has_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda _name: None)
    monkeypatch.setattr(subject, "which", lambda name: f"/usr/bin/{name}")
    assert install_advice("s3fs", prefix=tmp_path, python=PYTHON) == "run uv pip install --python /v/bin/python3 s3fs"


def test_the_environment_of_a_package_belongs_to_root_and_has_no_pip(tmp_path: Path) -> None:
    found = install_advice("s3fs", prefix=built_by_us(tmp_path, packaged=True), python=PYTHON)
    assert found == "run sudo pip --python /v/bin/python3 install s3fs"


def test_what_a_container_misses_is_added_to_its_image(tmp_path: Path) -> None:
    found = install_advice("s3fs", prefix=built_by_us(tmp_path, packaged=False), python=PYTHON)
    assert found == ("build an image FROM this one with USER root and RUN pip --python /v/bin/python3 install s3fs")


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        ({"url": "file:///w/k", "dir_info": {"editable": True}}, "run /v/bin/python3 -m pip install -e /w/k"),
        ({"url": "file:///w%20k", "dir_info": {}}, "run /v/bin/python3 -m pip install '/w k'"),
        (
            {"url": "file:///k.whl", "archive_info": {"hash": "sha256=0"}},
            "run /v/bin/python3 -m pip install --force-reinstall /k.whl",
        ),
        (None, "install kinetod again from its checkout or wheel"),
    ],
)
def test_kinetod_is_installed_again_from_where_it_came(origin: object, advice: str, tmp_path: Path) -> None:
    assert again(origin, tmp_path) == advice


def test_kinetod_of_a_package_or_an_image_is_installed_again_as_a_whole(tmp_path: Path) -> None:
    assert again(None, built_by_us(tmp_path / "image", packaged=False)) == "pull the image again"
    assert again(None, built_by_us(tmp_path / "deb", packaged=True)) == "install the package kinetod again"


def test_our_builds_leave_the_files_that_tell_them_apart() -> None:
    root = Path(__file__).parents[4]
    build, image = (root / name for name in ("deploy/packages/build.sh", "deploy/container/Dockerfile"))
    assert "share/sbom/kinetod.cdx.json" in build.read_text() and "share/sbom/kinetod.cdx.json" in image.read_text()
    assert "share/doc/kinetod" in build.read_text() and "share/doc/kinetod" not in image.read_text()
