"""All orders of two brokers in a rotation of the key encryption key, with crashes at each step.

One actor stops at one step of the store, before or after its effect; meanwhile another one acts to
its end. Then the first goes on, or has crashed and its broker starts again. This is repeated for
every step that the first one takes.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.test_devices import REQUEST, D, S, World
from broker.test_rewrapping import ID, NEW, OLD, fill, secrets_of
from brokers import Count, rewrapping_of, start_broker, tenant_key_rotation_of
from sealane.crypto.keys import WrappingKey
from sealane.daemon.broker import rewrapping
from sealane.daemon.broker.keyring import UNNAMED
from sealane.daemon.broker.records import DeviceRequestRecord, VolumeRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.contract import Change, Compare, Entry, Page, Store
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.errors import Error, UnavailableError, UsageError
from sealane.protocol.kinds import AnchorKind

pytestmark = pytest.mark.slow

Act = Callable[[Registry], Awaitable[Any]]

UNUSED = "t5"
"""A tenant without volumes."""


class Stopping:
    """A broker's view of a store: at one of its steps something else happens first."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.steps = 0
        self.stop_at = 0
        self.is_after = False
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.is_dead = False

    async def _step(self, work: Callable[[], Awaitable[Any]]) -> Any:
        if self.is_dead:
            raise UnavailableError("broker.store.failed", "crashed")
        self.steps += 1
        stops = self.steps == self.stop_at
        result = await work() if not stops or self.is_after else None
        if stops and self.meanwhile is not None:
            await self.meanwhile()
            if self.is_dead:
                raise UnavailableError("broker.store.outcome_unknown", "crashed")
        return await work() if stops and not self.is_after else result

    async def get(self, key: str) -> Entry | None:
        found: Entry | None = await self._step(lambda: self.inner.get(key))
        return found

    async def range(self, prefix: str, *, after: str = "", limit: int = 1000) -> Page:
        page: Page = await self._step(lambda: self.inner.range(prefix, after=after, limit=limit))
        return page

    async def revision(self) -> int:
        return await self.inner.revision()

    async def commit(
        self,
        compares: Sequence[Compare] = (),
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
    ) -> int | None:
        done: int | None = await self._step(lambda: self.inner.commit(compares, puts, deletes))
        return done

    def watch(self, prefix: str, *, from_revision: int) -> AsyncIterator[tuple[Change, ...]]:
        return self.inner.watch(prefix, from_revision=from_revision)

    def scan(self) -> AsyncIterator[Page]:
        return self.inner.scan()

    @property
    def failure(self) -> Error | None:
        return None

    async def close(self) -> None:
        """The store belongs to both brokers."""


async def rotate(registry: Registry) -> None:
    rotation = rewrapping_of(registry)
    try:
        await rotation.begin()
    except UsageError as error:
        if error.reason != "broker.key.retired":
            raise
        # The other actor has finished the rotation.
        assert (await registry.authority_record()).record.key_id == ID[NEW]
    await rotation.proceed()


async def new_tenant(registry: Registry) -> None:
    await registry.tenant_key("t4", 0)


async def replace_tenant_key(registry: Registry) -> None:
    """Make a tenant's next key; the one before moves to another record."""
    await tenant_key_rotation_of(registry).prepare("t1", 0)


async def delete_tenant_key(registry: Registry) -> None:
    """End the rotation of a tenant's key, and delete the one before, which no volume needs."""
    rotation = tenant_key_rotation_of(registry)
    await rotation.proceed()
    await rotation.rotate(UNUSED, 1)
    await rotation.proceed()
    shown = await rotation.progress(UNUSED)
    assert (shown.stage, shown.former) == (None, ())


async def new_volume(registry: Registry) -> None:
    """Register a volume of a tenant that has no key yet."""
    await World(registry).volume()


async def new_anchored_volume(registry: Registry) -> None:
    """Register a volume on a third party, which is a device, of a tenant that has a key."""
    volume_id = uuid.UUID(int=3)
    await registry.register(
        VolumeRecord(
            volume_id=volume_id,
            tenant="t1",
            display_name="",
            sector_count=1,
            target_node="g",
            generation=1,
            key_epoch=1,
            mode="local",
            third_party="p",
            request_id=uuid.UUID(int=4),
            device_id=volume_id,
        )
    )


async def open_device(registry: Registry) -> None:
    await World(registry).devices.open(S, device_id=D, anchor="none", found=(), request_id=REQUEST)


async def admit_device(registry: Registry) -> None:
    asks = DeviceRequestRecord(device_id=D, anchor=AnchorKind.NONE)
    await registry.commit(puts=registry.device_requests.sealed("s", asks))
    await World(registry).books.authorize(D)


async def change_tenant(registry: Registry) -> None:
    async def attempt() -> int | None:
        stored = await registry.tenants.get("t2")
        assert stored is not None
        changed = stored.record.model_copy(update={"volume_count": 1})
        return await registry.commit(
            [registry.tenants.unchanged("t2", stored)], registry.tenants.sealed("t2", changed)
        )

    await registry.settle(attempt)


async def announce(registry: Registry) -> None:
    await rewrapping_of(registry, instance=4).announce()


async def check_readable(store: Store) -> None:
    """Every key is under the one that its record names, if any, and brokers have that one."""
    registry = await Registry.open(Stopping(store), WrappingKey(OLD), WrappingKey(NEW), node="b")
    record = (await registry.authority_record()).record
    for table in (registry.tenants, registry.devices):
        for stored in (await table.page(limit=100))[0]:  # type: ignore[attr-defined]
            assert stored.record.key_id in {record.key_id, record.previous_key_id, UNNAMED}
    await secrets_of(registry)
    await registry.close()


async def run(
    path: Path, first: Act, second: Act, *, stop_at: int, is_after: bool, crashes: bool
) -> bool:
    """Return whether the first actor took that many steps; check what is left in the end."""
    store = SqliteStore(path)
    _, _, made = await start_broker(Stopping(store), starts=Count(), heads=Count(), kek=OLD)
    await fill(made)
    before = await secrets_of(made)
    if delete_tenant_key in {first, second}:
        await made.tenant_key(UNUSED, 0)
        await tenant_key_rotation_of(made).prepare(UNUSED, 0)
    await rewrapping_of(made).announce([WrappingKey(OLD), WrappingKey(NEW)])
    await made.close()
    views = [Stopping(store), Stopping(store)]
    one, two = [
        await Registry.open(view, WrappingKey(OLD), WrappingKey(NEW), node="b") for view in views
    ]
    view = views[0]
    view.steps, view.stop_at, view.is_after = 0, stop_at, is_after

    async def meanwhile() -> None:
        view.meanwhile = None
        await check_readable(store)
        await second(two)
        await check_readable(store)
        view.is_dead = crashes

    view.meanwhile = meanwhile
    try:
        await first(one)
    except UnavailableError:
        assert view.is_dead
    was_stopped = view.meanwhile is None
    await one.close()
    last = await Registry.open(Stopping(store), WrappingKey(OLD), WrappingKey(NEW), node="b")
    if last.current_key((await last.authority_record()).record) == ID[OLD]:
        await rotate(last)
    await rewrapping_of(last).proceed()
    await last.close()
    await two.close()
    # Only the new key is needed, and all keys are what they were.
    alone = await Registry.open(Stopping(store), WrappingKey(NEW), node="b")
    record = (await alone.authority_record()).record
    assert (record.key_id, record.previous_key_id) == (ID[NEW], UNNAMED)
    assert record.retired_key_ids == (ID[OLD],)
    assert set(before) <= set(await secrets_of(alone))
    changed = await alone.tenants.get("t2")
    assert changed is not None
    assert changed.record.volume_count == int(second is change_tenant and was_stopped)
    await alone.close()
    await store.close()
    return was_stopped


@pytest.mark.parametrize("crashes", [False, True], ids=["goes-on", "crashes"])
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "actors",
    [
        (rotate, rotate),
        (rotate, new_tenant),
        (rotate, replace_tenant_key),
        (rotate, change_tenant),
        (rotate, delete_tenant_key),
        (delete_tenant_key, rotate),
        (new_tenant, rotate),
        (replace_tenant_key, rotate),
        (new_volume, rotate),
        (new_anchored_volume, rotate),
        (open_device, rotate),
        (admit_device, rotate),
        (announce, rotate),
    ],
    ids=lambda actors: "-".join(each.__name__ for each in actors),
)
async def test_every_order_ends_with_all_keys_under_the_new_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    actors: tuple[Act, Act],
    is_after: bool,
    crashes: bool,
) -> None:
    monkeypatch.setattr(rewrapping, "BATCH_RECORDS", 2)
    steps = 0
    while True:
        path = tmp_path / f"{steps}.sqlite"
        async with asyncio.timeout(30):
            was_stopped = await run(
                path, *actors, stop_at=steps + 1, is_after=is_after, crashes=crashes
            )
        if not was_stopped:
            break
        steps += 1
    assert steps > 1


async def test_key_that_moves_to_another_record_is_met_by_a_pass(tmp_path: Path) -> None:
    """Of the only tenant: nothing else makes another pass necessary."""
    steps, was_stopped = 0, True
    while was_stopped:
        steps += 1
        was_stopped = await _moves_beside(tmp_path / f"{steps}.sqlite", stop_at=steps)
    assert steps > 1


async def _moves_beside(path: Path, *, stop_at: int) -> bool:
    store = SqliteStore(path)
    _, _, made = await start_broker(Stopping(store), starts=Count(), heads=Count(), kek=OLD)
    before = bytes(await made.tenant_key("t1", 0))
    await rewrapping_of(made).announce([WrappingKey(OLD), WrappingKey(NEW)])
    await made.close()
    views = [Stopping(store), Stopping(store)]
    one, two = [
        await Registry.open(view, WrappingKey(OLD), WrappingKey(NEW), node="b") for view in views
    ]
    view = views[0]
    view.steps, view.stop_at = 0, stop_at

    async def meanwhile() -> None:
        view.meanwhile = None
        await replace_tenant_key(two)

    view.meanwhile = meanwhile
    await rotate(one)
    was_stopped = view.meanwhile is None
    await one.close()
    await two.close()
    alone = await Registry.open(Stopping(store), WrappingKey(NEW), node="b")
    assert await alone.tenant_key("t1", 0) == before
    await alone.close()
    await store.close()
    return was_stopped


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("rotates_first", [False, True])
async def test_no_rotation_begins_beside_a_broker_that_lacks_its_key(
    tmp_path: Path, rotates_first: bool, is_after: bool
) -> None:
    """Either the broker is seen to lack the key, or it is refused at its own start."""
    steps = 0
    while await _starts_beside(
        tmp_path / f"{steps}.sqlite", rotates_first, stop_at=steps + 1, is_after=is_after
    ):
        steps += 1
    assert steps > 1


async def _starts_beside(path: Path, rotates_first: bool, *, stop_at: int, is_after: bool) -> bool:
    store = SqliteStore(path)
    _, _, made = await start_broker(Stopping(store), starts=Count(), heads=Count(), kek=OLD)
    await rewrapping_of(made).announce([WrappingKey(OLD), WrappingKey(NEW)])
    await made.close()
    views = [Stopping(store), Stopping(store)]
    has_both = await Registry.open(views[0], WrappingKey(OLD), WrappingKey(NEW), node="b")
    lacking = await Registry.open(views[1], WrappingKey(OLD), node="b")
    done: list[str] = []

    async def rotates() -> None:
        try:
            await rewrapping_of(has_both).begin()
            done.append("rotates")
        except UsageError as error:
            if error.reason != "broker.key.not_held":
                raise

    async def starts() -> None:
        try:
            await rewrapping_of(lacking, instance=4).announce()
            done.append("starts")
        except UsageError as error:
            if error.reason != "broker.key.missing":
                raise

    first, second = (rotates, starts) if rotates_first else (starts, rotates)
    view = views[0 if rotates_first else 1]
    view.steps, view.stop_at, view.is_after = 0, stop_at, is_after

    async def meanwhile() -> None:
        view.meanwhile = None
        await second()

    view.meanwhile = meanwhile
    await first()
    was_stopped = view.meanwhile is None
    if was_stopped:
        assert len(done) == 1, done
    await has_both.close()
    await lacking.close()
    await store.close()
    return was_stopped
