"""The bill of materials of the image and the packages."""

from pathlib import Path
from typing import Any

import pytest
from pinned.pins import Pin
from pinned.sbom import BillError, completed, digest_of, installed_from, native_libraries

CLICK, OWN = "c" * 64, "d" * 64
FILES = {"click": ("8.5.1", CLICK), "kinetod": ("0.1.0", OWN)}
PINS = {"click": Pin(name="click", version="8.5.1", marker="", digests=frozenset({CLICK}))}
LICENCES = [{"license": {"id": "BSD-3-Clause"}}]


def bill(*others: dict[str, Any]) -> dict[str, Any]:
    """What cyclonedx-py says of an environment with click, kinetod and others."""
    click = {"name": "Click", "version": "8.5.1", "licenses": LICENCES}
    own = {"name": "kinetod", "version": "0.1.0", "licenses": LICENCES}
    return {"components": [click, own, *others], "metadata": {}}


def test_each_package_has_version_hash_and_licence_and_kinetod_its_libraries() -> None:
    libraries = [{"name": "libkineto_codec.so"}]
    made = completed(bill(), FILES, PINS, libraries)
    hashes = [{"alg": "SHA-256", "content": CLICK}]
    assert made["components"] == [{"name": "Click", "version": "8.5.1", "licenses": LICENCES, "hashes": hashes}]
    about = made["metadata"]["component"]
    assert (about["name"], about["type"], about["components"]) == ("kinetod", "application", libraries)
    assert about["hashes"] == [{"alg": "SHA-256", "content": OWN}]


def test_a_package_that_pip_did_not_install_gets_no_bill() -> None:
    with pytest.raises(BillError, match=r"six 1\.0 was not installed by pip from a file with a hash"):
        completed(bill({"name": "six", "version": "1.0", "licenses": LICENCES}), FILES, PINS, [])


def test_nor_does_one_that_the_lock_lacks_or_has_in_another_file() -> None:
    with pytest.raises(BillError, match=r"is in the environment and not in requirements\.txt"):
        completed(bill(), FILES, {}, [])
    other = {"click": Pin(name="click", version="8.5.1", marker="", digests=frozenset({OWN}))}
    with pytest.raises(BillError, match=r"is not what requirements.txt pins: 8\.5\.1"):
        completed(bill(), FILES, other, [])


def test_a_package_without_a_licence_gets_no_bill() -> None:
    nameless = {"name": "six", "version": "1.0"}
    with pytest.raises(BillError, match=r"six 1\.0 names no licence"):
        completed(bill(nameless), FILES | {"six": ("1.0", CLICK)}, PINS, [])


def test_the_hash_of_a_package_is_that_of_the_file_that_pip_took() -> None:
    archive = {"archive_info": {"hashes": {"sha256": CLICK}}}
    report = {"install": [{"metadata": {"name": "Click", "version": "8.5.1"}, "download_info": archive}]}
    assert installed_from(report) == {"click": ("8.5.1", CLICK)}


def test_native_libraries_are_named_by_what_lies_in_the_environment(tmp_path: Path) -> None:
    library = tmp_path / "lib/python3.11/site-packages/kineto_trace/_native/libkineto_codec.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"code")
    (part,) = native_libraries(tmp_path)
    assert (part["name"], part["hashes"][0]["content"]) == ("libkineto_codec.so", digest_of(library))
    with pytest.raises(BillError, match="no native libraries"):
        native_libraries(tmp_path / "elsewhere")
