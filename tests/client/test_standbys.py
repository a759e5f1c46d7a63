"""A disk with several gateways: which it accepts, and which path it takes."""

import asyncio
import errno
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from patience import PATIENCE_SECONDS
from sealane.client.disk_queues import DiskQueues, FrontEnd
from sealane.client.volume import Volume, standby_ends, volume_of
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import volumes_pb2


def attached(port: int, **changed: str) -> Volume:
    values = {"subsystem_nqn": "nqn.volume", "host_nqn": "nqn.host", "fail_over_group": "acme/1"}
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
    assert standby_ends(attached(1, fail_over_group=""), []) == []


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({}, {"fail_over_group": ""}),
        ({"fail_over_group": ""}, {}),
        ({"fail_over_group": ""}, {"fail_over_group": ""}),
        ({}, {"fail_over_group": "other/1"}),
        ({}, {"subsystem_nqn": "nqn.other"}),
        ({}, {"host_nqn": "nqn.other"}),
    ],
)
def test_paths_that_no_fence_orders_are_refused(own: dict[str, str], other: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"disk\.paths"):
        standby_ends(attached(1, **own), [attached(2, **other)])


@dataclass(eq=False)
class Path:
    """An association of a path, or its failures, one an attempt; `seconds` until it connects."""

    rank: int = 0
    errors: list[Exception] = field(default_factory=list)
    seconds: float = 0.0
    close_seconds: float = 0.0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    async def close(self) -> None:
        await asyncio.sleep(self.close_seconds)
        self.is_closed = True

    @property
    def path(self) -> FrontEnd:
        return end(0)

    @property
    def queues(self) -> list[Any]:
        return [SimpleNamespace(outstanding=0)]

    namespace = None
    has_compare_and_write = False


def end(index: int) -> FrontEnd:
    return FrontEnd(
        traddr="127.0.0.1",
        trsvcid=index,
        subsystem_nqn="nqn.volume",
        namespace_id=1,
        host_nqn="nqn.host",
    )


def queues_of(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> DiskQueues:
    async def connect(_: DiskQueues, front: FrontEnd) -> Path:
        path = paths[front.trsvcid]
        if path.errors:
            raise path.errors.pop(0)
        await asyncio.sleep(path.seconds)
        path.connected.set()
        return path

    monkeypatch.setattr(DiskQueues, "_connect_to", connect)
    first, *others = [end(index) for index in range(len(paths))]
    return DiskQueues(first, queue_count=1, timeout_seconds=1.0, hold_seconds=2.0, standbys=others)


async def chosen(queues: DiskQueues, *, is_repeated: bool = False) -> Path:
    async with asyncio.timeout(PATIENCE_SECONDS):
        best = await queues._connect(is_repeated=is_repeated)
        await queues.close()
    return cast("Any", best)


def refused() -> VerificationError:
    return VerificationError("disk.changed", "another namespace")


def away() -> UnavailableError:
    return UnavailableError("connection.refused", "away")


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_the_optimized_path_is_taken_and_the_others_are_closed(
    monkeypatch: pytest.MonkeyPatch, is_repeated: bool
) -> None:
    paths = [Path(rank=1), Path(rank=0, seconds=0.05), Path(rank=2)]
    queues = queues_of(monkeypatch, *paths)
    assert await chosen(queues, is_repeated=is_repeated) is paths[1]
    assert [path.is_closed for path in paths] == [True, False, True]


async def test_a_path_that_connects_after_the_choice_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [Path(), Path()]
    assert await chosen(queues_of(monkeypatch, *paths), is_repeated=True) is paths[0]
    assert [path.is_closed for path in paths] == [False, True]


async def test_a_standby_is_taken_when_the_serving_path_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [Path(seconds=60.0), Path(rank=1)]
    assert await chosen(queues_of(monkeypatch, *paths)) is paths[1]
    assert not paths[1].is_closed


async def test_a_silent_path_holds_up_no_retry_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(seconds=60.0), Path(rank=1, errors=[away(), refused(), away()])]
    assert await chosen(queues_of(monkeypatch, *paths), is_repeated=True) is paths[1]


async def test_a_path_that_may_come_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(errors=[refused()] * 1000), Path(errors=[away()] * 3)]
    assert await chosen(queues_of(monkeypatch, *paths), is_repeated=True) is paths[1]
    for is_repeated in (False, True):
        paths = [Path(errors=[refused()] * 1000) for _ in range(2)]
        with pytest.raises(VerificationError):
            await chosen(queues_of(monkeypatch, *paths), is_repeated=is_repeated)


async def test_the_error_names_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError) as caught:
        await queues_of(monkeypatch, Path(errors=[refused()]), Path(errors=[away()])).open()
    for text in (r"127.0.0.1:0: another namespace [disk.changed]", "127.0.0.1:1: away"):
        assert text in str(caught.value)


async def test_a_path_that_fails_verification_is_logged_when_the_disk_opens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queues = queues_of(monkeypatch, Path(), Path(errors=[refused()]), Path(errors=[away()]))
    await queues.open()
    await queues.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "127.0.0.1:1 is refused: another namespace" in record.getMessage()


async def used(queues: DiskQueues) -> None:
    async def nothing(_: object) -> None:
        pass

    async with asyncio.timeout(PATIENCE_SECONDS):
        await queues.run(nothing)


async def test_an_unexpected_failure_reaches_the_caller_and_the_disk_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [Path(), Path(rank=1)]
    queues = queues_of(monkeypatch, *paths)
    await queues.open()
    for path in paths:
        path.errors = [OSError(errno.EMFILE, "too many open files")]
    monkeypatch.setattr(asyncio.get_running_loop(), "call_exception_handler", lambda _: None)
    queues._lost(cast("Any", paths[0]), away())
    with pytest.raises(OSError, match="too many open files"):
        await used(queues)
    for path in paths:
        path.errors = []
    await used(queues)
    await queues.close()
    assert all(path.is_closed for path in paths)


async def test_a_call_that_reaches_no_path_in_time_names_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [Path(), Path(errors=[away()] * 1000)]
    queues = queues_of(monkeypatch, *paths)
    await queues.open()
    paths[0].seconds = 60.0
    queues._lost(cast("Any", paths[0]), UnavailableError("connection.timeout", "frozen"))
    with pytest.raises(UnavailableError, match=r"disk\.timeout") as caught:
        await used(queues)
    for text in ("127.0.0.1:0: frozen [connection.timeout]", "127.0.0.1:1: away"):
        assert text in str(caught.value)
    await queues.close()


async def test_a_cancelled_opening_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(rank=1, close_seconds=0.05), Path(rank=2, close_seconds=0.05), Path(seconds=60.0)]
    opening = asyncio.ensure_future(queues_of(monkeypatch, *paths).open())
    await paths[1].connected.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert [path.is_closed for path in paths] == [True, True, False]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_reconnect_that_closing_ends_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    paths = [Path(close_seconds=0.05), Path(rank=1, close_seconds=0.05, seconds=0.01)]
    queues = queues_of(monkeypatch, *paths)
    await queues.open()
    queues._lost(cast("Any", paths[0]), away())
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(queues.close())
    if is_cancelled:
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        await queues._closing.wait()
    else:
        await closing
    assert all(path.is_closed for path in paths)


async def test_a_cancelled_close_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(close_seconds=0.05)
    queues = queues_of(monkeypatch, path)
    await queues.open()
    closing = asyncio.ensure_future(queues.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait((closing,))
    await queues._closing.wait()
    assert path.is_closed
