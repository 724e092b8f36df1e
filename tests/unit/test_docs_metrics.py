"""docs/metrics.md, the dashboard and the alert rules name the metrics that there are."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
DASHBOARD = ROOT / "deploy/grafana/kinetod.json"
COLUMNS = 24  # of a Grafana dashboard
_METRIC = re.compile(r"\b(?:kineto|process)_[a-z0-9_]+")
_OF_LIBRARY = {"process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_metrics", DOCS / "generate_metrics.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented() -> dict[str, str]:
    """Name -> type."""
    return dict(re.findall(r"^\| `(kineto_\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))


def queryable() -> set[str]:
    """The names that a query can have."""
    names = set(_OF_LIBRARY)
    for name, kind in documented().items():
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_the_tables_are_current(generator: ModuleType) -> None:
    written = (DOCS / "metrics.md").read_text()
    assert written == generator.with_tables(written), "run `python docs/generate_metrics.py`"
    assert len(documented()) > 60


def test_alert_rules_ask_for_metrics_that_exist_and_say_what_to_do() -> None:
    for rule in rules():
        assert set(_METRIC.findall(rule["expr"])) - queryable() == set(), rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")
    assert len({rule["alert"] for rule in rules()}) == len(rules())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_promtool_takes_the_alert_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_what_grafana_loads() -> None:
    found = dashboard()
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= found.keys()
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["w"] > 0
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_no_panels_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_the_dashboard_asks_for_metrics_and_variables_that_exist() -> None:
    found = dashboard()
    variables = {variable["name"] for variable in found["templating"]["list"]}
    for panel in found["panels"]:
        for target in panel.get("targets", ()):
            assert set(_METRIC.findall(target["expr"])) - queryable() == set(), panel["title"]
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range"}
            assert used <= variables, panel["title"]
    for variable in found["templating"]["list"]:
        assert set(_METRIC.findall(variable.get("definition", ""))) <= queryable()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_promtool_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    filled = [
        re.sub(r"\$__(rate_interval|range)", "5m", re.sub(r"\$(instance|hostname)", ".*", query)) for query in queries
    ]
    recorded = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(filled)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
