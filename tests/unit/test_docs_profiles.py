"""docs/profiles.md has every type, label and attribute of profiles, each with what the code says of it."""

from pathlib import Path

from kineto_trace.formats.profile_samples import ATTRIBUTES, LABELS, SAMPLE_TYPES
from kinetod.config.addresses import OTLP_PATH, PYROSCOPE_PATH
from kinetod.hooks.profile_payload import PYROSCOPE_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text()


def test_every_type_is_documented_with_its_unit_and_meaning() -> None:
    for kind, meaning in SAMPLE_TYPES.items():
        assert f"\n| `{kind.name}` | {kind.unit} | {meaning} |\n" in PAGE


def test_every_label_is_documented_with_its_attribute() -> None:
    for label, attribute in LABELS.items():
        assert f"\n| `{label}` | `{attribute}` | " in PAGE


def test_every_attribute_is_documented_with_its_meaning() -> None:
    for attribute, meaning in ATTRIBUTES.items():
        assert f"\n| `{attribute}` | {meaning} |\n" in PAGE


def test_the_calls_and_the_names_in_pyroscope_are_documented() -> None:
    for text in (OTLP_PATH, PYROSCOPE_PATH.removeprefix("/"), *PYROSCOPE_NAMES.values()):
        assert f"`{text}`" in PAGE
