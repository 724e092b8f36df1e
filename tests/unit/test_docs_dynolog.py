"""docs/dynolog.md: the table of flags is current."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_flags_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate_dynolog", DOCS / "generate_dynolog.py")
    assert spec and spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = (DOCS / "dynolog.md").read_text()
    assert written == generator.with_table(written), "run `python docs/generate_dynolog.py`"
    assert written.count("| `--") > 50
