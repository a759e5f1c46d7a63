"""A fabric says when the kernel's limit for receive buffers is too small."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sealane._native import SOCKET_BUFFER_BYTES
from sealane.daemon.fabric.buffers import warn_of_small_buffers


@pytest.mark.parametrize(
    ("content", "warnings"),
    [
        ("212992\n", 1),
        (f"{SOCKET_BUFFER_BYTES - 1}\n", 1),
        (f"{SOCKET_BUFFER_BYTES}\n", 0),
        ("", 0),
    ],
)
def test_a_limit_below_the_buffer_of_a_session_is_a_warning(
    tmp_path: Path, content: str, warnings: int
) -> None:
    limit = tmp_path / "rmem_max"
    limit.write_text(content)
    with capture_logs() as logged:
        warn_of_small_buffers(limit)
    assert [each["event"] for each in logged] == ["receive_buffer_small"] * warnings
    for each in logged:
        assert each["command"] == f"sysctl -w net.core.rmem_max={SOCKET_BUFFER_BYTES}"


def test_a_kernel_that_does_not_tell_its_limit_is_no_warning(tmp_path: Path) -> None:
    with capture_logs() as logged:
        warn_of_small_buffers(tmp_path / "absent")
    assert not logged
