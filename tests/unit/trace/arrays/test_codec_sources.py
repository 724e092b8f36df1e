"""The codec in C: what each file says about itself, and what the library exports."""

import subprocess
from pathlib import Path

import pytest

SERVICE = Path(__file__).parents[4] / "daemon"
LIBRARY = SERVICE / "kineto_trace" / "_native" / "libkineto_codec.so"


@pytest.mark.parametrize("path", sorted((SERVICE / "native").rglob("*.c")), ids=lambda path: path.name)
def test_a_c_file_says_which_threads_run_it_and_where_it_blocks(path: Path) -> None:
    comment = path.read_text().split("*/")[0]
    assert comment.startswith("/*") and "\n * Threads: " in comment and "\n * Blocks: " in comment


def test_what_is_exported_has_one_prefix() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert names and all(name.startswith("kc_") for name in names)
