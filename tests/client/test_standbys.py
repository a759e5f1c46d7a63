"""A disk with several gateways: which it accepts, and which path it takes."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from sealane.client.disk_queues import DiskQueues, FrontEnd
from sealane.client.volume import Volume, standby_ends, volume_of
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import volumes_pb2


def attached(port: int, **changed: str) -> Volume:
    values = {"subsystem_nqn": "nqn.volume", "host_nqn": "nqn.host", "fail_over": "standby"}
    return volume_of(
        volumes_pb2.Volume(
            name=f"volumes/{port}",
            attachment=volumes_pb2.Attachment(
                traddr="127.0.0.1",
                trsvcid=port,
                namespace_id=1,
                dhchap_secret="DHHC-1:secret",
                **(values | changed),
            ),
        )
    )


def test_the_gateways_of_a_group_are_accepted_in_order() -> None:
    ends = standby_ends(attached(1), [attached(2), attached(3)])
    assert [end.trsvcid for end in ends] == [2, 3]
    assert standby_ends(attached(1, fail_over=""), []) == []


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({}, {"fail_over": ""}),
        ({"fail_over": ""}, {}),
        ({}, {"subsystem_nqn": "nqn.other"}),
        ({}, {"host_nqn": "nqn.other"}),
    ],
)
def test_paths_that_no_fence_orders_are_refused(own: dict[str, str], other: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"disk\.paths"):
        standby_ends(attached(1, **own), [attached(2, **other)])


@dataclass(eq=False)
class Path:
    """An association of a path, or its failure; `seconds` until it is connected."""

    rank: int = 0
    error: Error | None = None
    seconds: float = 0.0
    is_closed: bool = False

    async def close(self) -> None:
        self.is_closed = True


async def chosen(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> Path:
    async def connect(_: DiskQueues, front: FrontEnd) -> Path:
        path = paths[front.trsvcid]
        await asyncio.sleep(path.seconds)
        if path.error is not None:
            raise path.error
        return path

    monkeypatch.setattr(DiskQueues, "_connect_to", connect)
    first, *others = [
        FrontEnd(
            traddr="127.0.0.1",
            trsvcid=index,
            subsystem_nqn="nqn.volume",
            namespace_id=1,
            host_nqn="nqn.host",
        )
        for index in range(len(paths))
    ]
    queues = DiskQueues(
        first, queue_count=1, timeout_seconds=1.0, hold_seconds=1.0, standbys=others
    )
    async with asyncio.timeout(5):
        return cast("Any", await queues._connect())


async def test_the_optimized_path_is_taken_and_the_others_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [Path(rank=1), Path(rank=0, seconds=0.05), Path(rank=2)]
    assert await chosen(monkeypatch, *paths) is paths[1]
    assert [path.is_closed for path in paths] == [True, False, True]


async def test_a_standby_is_taken_when_the_serving_path_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [Path(seconds=60.0), Path(rank=1)]
    assert await chosen(monkeypatch, *paths) is paths[1]
    assert not paths[1].is_closed


async def test_a_path_that_may_come_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Path(error=VerificationError("connect.host", "not this host"))
    away = Path(error=UnavailableError("connection.refused", "away"))
    with pytest.raises(UnavailableError):
        await chosen(monkeypatch, refused, away)
    with pytest.raises(VerificationError):
        await chosen(monkeypatch, refused, refused)
