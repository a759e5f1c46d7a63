"""Alerts and the page on metrics: of metrics that exist, and tested."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from sealane.cli import top
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.statistics import CATALOGUE, LATENCIES

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))


def names() -> set[str]:
    """Return every metric that a daemon exports."""
    made = Metrics()
    for role in LATENCIES:
        made.add_latencies(role)
    text = generate_latest(made.registry).decode()
    found = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) | {"up"}
    found |= {
        f"{name}_bucket" for name in re.findall(r"^# TYPE (\w+) histogram", text, re.MULTILINE)
    }
    for prefix, statistics in CATALOGUE.items():
        for figure, each in statistics.items():
            suffix = "_total" if each.kind == "counter" else ""
            found.add(f"sealane_{prefix}_{each.name_of(figure)}{suffix}")
    return found


def test_alerts_are_about_metrics_that_exist() -> None:
    expressions = re.findall(r"^ +expr: (.*)", (RULES / "alerts.yaml").read_text(), re.MULTILINE)
    used = set(re.findall(r"\b(?:sealane_|process_)\w+", " ".join(expressions)))
    assert len(used) > 15
    assert used <= names(), used - names()


def test_the_page_names_no_metric_that_does_not_exist() -> None:
    page = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    head = page.partition("<!-- made by")[0]
    written = set(re.findall(r"`(sealane_\w+?)`", head))
    assert written <= names() | {"sealane_<role>_authorization_age_seconds"}, written - names()


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (make packages)"
)
def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    tests = (RULES / "alerts_test.yaml").read_text()
    for alert in re.findall(r"- alert: (\w+)", (RULES / "alerts.yaml").read_text()):
        assert tests.count(f"alertname: {alert}\n") == 2, alert
    tested = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yaml"],
        cwd=RULES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


def expressions(dashboard: Path) -> list[str]:
    panels = json.loads(dashboard.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_show_metrics_that_exist(dashboard: Path) -> None:
    used = set(re.findall(r"\b(?:sealane_|process_)\w+", " ".join(expressions(dashboard))))
    assert len(used) > 5
    assert used <= names(), used - names()


def test_top_reads_metrics_that_exist() -> None:
    used = set(re.findall(r'"(sealane_\w+)"', (ROOT / "cli" / "top.py").read_text()))
    assert len(used) > 20
    for role, (reads, writes, read, write, *sectors) in top.VOLUME_FIGURES.items():
        prefix = f"sealane_{role}_volume_"
        used |= {f"{prefix}{name}_total" for name in (reads, writes, *sectors)}
        used |= {f"{prefix}{name}_seconds_total" for name in (read, write)}
    assert used <= names(), used - names()


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (make packages)"
)
@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_expressions_of_dashboards_can_be_read(dashboard: Path, tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": each.replace("$__rate_interval", "5m")}
        for number, each in enumerate(expressions(dashboard))
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout


def test_dashboards_are_what_their_source_says() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools" / "dashboards", "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(DASHBOARDS) == 4


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_of_dashboards_neither_overlap_nor_leave_the_grid(dashboard: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
