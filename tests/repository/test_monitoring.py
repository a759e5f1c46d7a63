"""Alerts and the page on metrics: of metrics that exist, and tested."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.statistics import CATALOGUE

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
SAMPLES = ("_total", "_bucket", "_count", "_sum")


def names() -> set[str]:
    """Return every metric that a daemon exports."""
    text = generate_latest(Metrics().registry).decode()
    found = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) | {"up"}
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
