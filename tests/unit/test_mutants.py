"""The campaign of mutants leaves the tree alone."""

import os
from pathlib import Path

import pytest
from campaign import mutants

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "daemon/kinetod/base/libc.py"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_what_tests_of_a_mutant_write_is_not_in_the_tree(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        f"from pathlib import Path\ndef test_it():\n"
        f"    assert Path({str(MODULE)!r}).read_text() == '0'\n    Path({str(ROOT / 'written')!r}).touch()\n"
    )
    broken = tmp_path / "broken.py"
    broken.write_text("0")
    assert mutants._pass(broken, MODULE, (str(test),), 60)
    assert not mutants._pass(MODULE, MODULE, (str(test),), 60)
    assert not (ROOT / "written").exists()
