"""Settings and fixtures for all tests."""

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# No time limit per example: it would depend on the machine.
settings.register_profile("gate", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "hunt", deadline=None, max_examples=int(os.environ.get("CASES", "5000")), print_blob=True
)
settings.load_profile("gate")


LABS = ("lab", "lab_aarch64", "lab_compat", "lab_image", "lab_systemd", "lab_verbs")
"""Markers of tests that boot machines, or need the previous release: run only with `-m`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of the labs, unless the selection is about them."""
    if "lab" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if any(map(item.get_closest_marker, LABS))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have the summary give each reason for skipped tests once, not once a place."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        _, _, reason = report.longrepr
        # pytest counts those with the same path, line and reason in one line.
        report.longrepr = ("tests", None, reason)  # type: ignore[assignment]
    return report
