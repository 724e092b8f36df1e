"""The images of the documentation are what the code makes of the real capture."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = ("architecture.svg", "report.svg", "trace.svg")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_images", DOCS / "generate_images.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_these_are_all_images(generator: ModuleType) -> None:
    assert sorted(generator.IMAGES) == sorted(path.name for path in (DOCS / "images").glob("*.svg")) == sorted(IMAGES)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_current(generator: ModuleType, name: str) -> None:
    assert (DOCS / "images" / name).read_text() == generator.IMAGES[name](), "run `make images`"


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_stays_in_its_frame_and_loads_nothing(name: str) -> None:
    root = ElementTree.parse(DOCS / "images" / name).getroot()
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        assert kind not in ("image", "script", "foreignObject", "use")
        if kind == "rect":
            right = float(element.get("x", 0)) + float(element.get("width", 0))
            assert right <= width and float(element.get("y", 0)) + float(element.get("height", 0)) <= height
        if kind == "text":
            assert float(element.get("x", 0)) < width and float(element.get("y", 0)) < height
