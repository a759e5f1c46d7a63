"""Several daemons in one command."""

import argparse
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sealane.cli import several
from sealane.errors import UnavailableError

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_each_socket_counts_once(tmp_path: Path) -> None:
    own, another = tmp_path / "own", tmp_path / "another"
    (tmp_path / "link").symlink_to(own)
    also = [str(tmp_path / "link"), str(another), str(another), str(own)]
    options = argparse.Namespace(socket=str(own), also=also)
    assert several.others(options) == [str(another)]


async def test_calls_to_others_belong_to_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextlib.asynccontextmanager
    async def connect(_path: str, *, traceparent: str) -> AsyncIterator[Any]:
        told.append(traceparent)
        yield None

    monkeypatch.setattr(several, "connect", connect)
    monkeypatch.setenv("TRACEPARENT", TRACEPARENT)
    for is_endless in (False, True):
        options = argparse.Namespace(socket="/a", also=["/b"], is_endless=is_endless, every=None)
        async with several.daemons(None, options) as clients:  # type: ignore[arg-type]
            assert [*clients] == ["/a", "/b"]
    assert told == [TRACEPARENT, ""]


async def test_an_error_says_which_daemon_failed() -> None:
    async def call() -> None:
        raise UnavailableError("daemon.unreachable", "time-out")

    with pytest.raises(UnavailableError, match="daemon /b: time-out"):
        await several.named("/b", call())
