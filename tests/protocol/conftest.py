"""Fixtures: admin controllers shared by the tests of commands and of log pages."""

import pytest

from admin_entries import PLAIN, VOLUME, enabled
from sealane.protocol.nvme.admin import AdminController


@pytest.fixture
def admin() -> AdminController:
    return enabled(VOLUME)


@pytest.fixture
def plain() -> AdminController:
    return enabled(PLAIN)
