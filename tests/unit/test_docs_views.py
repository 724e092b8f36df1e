"""The website's page of views, and what views say of themselves."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.model.trace import SCHEMAS
from kineto_trace.sql import sql_tables
from kinetoctl.base.view_settings import DIFF_VIEWS
from kinetoctl.commands import export, report

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stub_by_which_editors_complete_views_is_current() -> None:
    stub = script("generate_view_stub")
    assert stub.PATH.read_text() == stub.document(), "run `make views`"


def test_the_page_of_views_has_each_view_and_table() -> None:
    page = script("generate_views").document()
    titles = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert sorted(titles) == sorted({*VIEWS, *sql_tables()})


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_every_view_says_what_it_computes_and_what_its_options_do(name: str) -> None:
    view = VIEWS[name]
    assert len(view.description.splitlines()[0]) <= 120
    others = [other.description for other in VIEWS.values() if re.search(rf"\b{other.name}\b", view.description)]
    text = "\n".join((view.description, *others))  # "options: those of launch_stats"
    assert {option for option in view.options if option not in text} == set()
    for column in view.result_columns:
        assert column.meaning, column.name


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_every_column_says_its_unit_in_its_name(name: str) -> None:
    endings = {"us": "_us", "%": "_pct", "ns": "_ns"}
    for column in VIEWS[name].result_columns:
        assert column.name.endswith(endings.get(column.unit, "")), column.name


def test_no_view_has_the_name_of_another_table() -> None:
    others = {table.name for table in sql_tables().values() if table.group != "views"}
    assert not others & set(VIEWS)
    assert set(SCHEMAS) <= others


def test_commands_name_views_and_formats_that_exist() -> None:
    from kineto_trace.formats.trace_export import FORMATS

    assert {*report.OVERVIEW, *report.PLUGIN_OVERVIEW, *report.JOB_OVERVIEW} <= set(VIEWS)
    assert set(DIFF_VIEWS.values()) <= set(VIEWS)
    assert set(export.FORMATS) == set(FORMATS)


def test_the_guide_names_views_that_exist_and_leaves_none_out() -> None:
    guide = (DOCS / "analysis.md").read_text()
    tables = guide[guide.index("## Coming from") : guide.index("## Many ranks")]
    named = set(re.findall(r"`([a-z_]+)`", tables))
    assert named == set(VIEWS)


def test_every_format_is_documented() -> None:
    text = (DOCS / "cli.md").read_text()
    for name in export.FORMATS:
        assert f"\n| `{name}` |" in text
