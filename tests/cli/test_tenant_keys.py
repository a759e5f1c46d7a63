"""`sealanectl key prepare-tenant` and `rotate-tenant`: what they ask for, show and refuse."""

import argparse
import asyncio
import contextlib
import io
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.tenant_keys import TENANT, change, register
from brokers import operator_of, running_broker
from sealane.cli import waiting
from sealane.cli.encryption_keys import key_status
from sealane.cli.output import Output
from sealane.cli.tenant_keys import key_prepare_tenant, key_rotate_tenant
from sealane.client import Client
from sealane.crypto.keys import KEY_EPOCHS_MAX
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.tenant_key_rotation import TenantKeyRotation
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import operator_pb2

Verb = Callable[[Client, argparse.Namespace, Output], Awaitable[None]]


class Operator:
    """The operator of a broker that works by itself while a command waits for it."""

    def __init__(self, registry: Registry, servicer: Any) -> None:
        self.registry = registry
        self.rotation: TenantKeyRotation = servicer._tenant_keys
        self.client = cast("Client", SimpleNamespace(operator=_Calls(servicer)))

    async def run(self, run: Verb, form: str = "table", **options: Any) -> str:
        shown = io.StringIO()
        asked = {"tenant": TENANT, "wait": True, "yes": True, **options}
        working = asyncio.ensure_future(self._work() if asked["wait"] else asyncio.sleep(0))
        try:
            async with asyncio.timeout(30):
                await run(self.client, argparse.Namespace(**asked), Output(form, shown))
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
        return shown.getvalue()

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            await self.rotation.proceed()


class _Calls:
    """Calls a service without a channel."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Any:
        async def call(request: Any, **_: Any) -> Any:
            return await getattr(self._servicer, name)(request, None)

        return call


@pytest.fixture
async def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operator]:
    """The operator of a broker with two volumes of a tenant."""
    monkeypatch.setattr(waiting, "WAIT_SECONDS", 0.01)
    async with running_broker(tmp_path / "b.sqlite") as broker:
        for number in (1, 2):
            await register(broker.registry, number)
        yield Operator(broker.registry, operator_of(broker))


async def test_each_step_says_what_is_to_be_done_next(operator: Operator) -> None:
    assert "tenant" not in await operator.run(key_status)
    shown = await operator.run(key_prepare_tenant, wait=False)
    assert "next" in shown
    assert "when all volumes are ready: sealanectl broker snapshot" in shown
    shown = await operator.run(key_prepare_tenant)
    assert "number 1, prepared: take a snapshot, then rotate; former keys kept: 0" in shown
    assert f"sealanectl key rotate-tenant {TENANT}" in shown
    assert "prepared: take a snapshot" in await operator.run(key_status)
    # Repeated, it makes no other key.
    data = json.loads(await operator.run(key_prepare_tenant, "json"))
    assert (data["number"], data["stage"], data["ready"], data["volumes"]) == (1, "prepared", 2, 2)
    data = json.loads(await operator.run(key_rotate_tenant, "json"))
    assert (data["stage"], data["rotated"], data["former_numbers"]) == ("", 2, [0])
    [listed] = json.loads(await operator.run(key_status, "json"))["tenant_keys"]
    assert (listed["tenant"], listed["number"], listed["stage"]) == (TENANT, 1, "")
    assert "number 2, prepared" in await operator.run(key_prepare_tenant)


async def test_rotation_asks_first_and_says_what_will_happen(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await operator.run(key_prepare_tenant)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UsageError) as caught:
        await operator.run(key_rotate_tenant, yes=False)
    assert caught.value.reason == "confirmation.missing"
    assert f"2 volumes of tenant {TENANT} will begin a key epoch" in str(caught.value)
    assert (await operator.rotation.progress(TENANT)).rotated == 0


async def test_rotation_that_nobody_prepared_is_refused(operator: Operator) -> None:
    with pytest.raises(UsageError) as caught:
        await operator.run(key_rotate_tenant)
    assert caught.value.reason == "broker.tenant_key.not_prepared"


async def test_rotation_that_is_repeated_after_its_end_shows_the_key(operator: Operator) -> None:
    await operator.run(key_prepare_tenant)
    await operator.run(key_rotate_tenant)
    shown = await operator.run(key_rotate_tenant, yes=False)
    assert "number 1; former keys kept: 0" in shown
    assert "next" not in shown


async def test_no_rotation_begins_unasked_while_the_preparation_ends(operator: Operator) -> None:
    """The stage is read while volumes are made ready; by the time of the call they are."""
    await operator.rotation.prepare(TENANT, 0)
    asked = operator.client.operator.GetTenantKey

    async def ask(request: object, **options: object) -> operator_pb2.TenantKey:
        key: operator_pb2.TenantKey = await asked(request, **options)
        await operator.rotation.proceed()
        return key

    calls = SimpleNamespace(
        GetTenantKey=ask, RotateTenantKey=operator.client.operator.RotateTenantKey
    )
    operator.client = cast("Client", SimpleNamespace(operator=calls))
    with pytest.raises(UsageError) as caught:
        await operator.run(key_rotate_tenant, wait=False)
    assert caught.value.reason == "broker.tenant_key.not_prepared"
    assert "0 of 2 volumes ready, wait" in str(caught.value)
    assert (await operator.rotation.progress(TENANT)).stage == "prepared"


async def test_volume_without_epochs_left_is_named_and_the_wait_fails(operator: Operator) -> None:
    await change(operator.registry, 2, key_epoch=KEY_EPOCHS_MAX)
    await operator.run(key_prepare_tenant)
    with pytest.raises(UnavailableError) as caught:
        await operator.run(key_rotate_tenant)
    assert caught.value.reason == "broker.tenant_key.incomplete"
    assert str(uuid.UUID(int=2)) in str(caught.value)
    shown = await operator.run(key_status)
    assert f"no key epochs left for 1 volumes, {uuid.UUID(int=2)}\n" in shown.replace(";", "\n")


async def test_of_many_volumes_without_epochs_left_a_few_are_named(operator: Operator) -> None:
    for number in range(1, 7):
        if number > 2:
            await register(operator.registry, number)
        await change(operator.registry, number, key_epoch=KEY_EPOCHS_MAX)
    await operator.run(key_prepare_tenant)
    with pytest.raises(UnavailableError) as caught:
        await operator.run(key_rotate_tenant)
    assert "6 volumes of tenant" in str(caught.value)
    assert str(caught.value).count("00000000-") == 4
    assert "…" in str(caught.value)
    data = json.loads(await operator.run(key_status, "json"))
    [listed] = data["tenant_keys"]
    assert (listed["exhausted_volumes"], len(listed["exhausted_volume_ids"])) == (6, 6)


async def test_wait_asks_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    answers = iter(range(6, -1, -1))

    async def ask() -> int:
        return next(answers)

    assert await waiting.ended(next(answers), lambda left: str(left or ""), ask) == 0
    assert slept == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("run", [key_prepare_tenant, key_rotate_tenant])
async def test_wait_ends_with_the_reason_why_the_broker_cannot_go_on(run: Verb) -> None:
    stage = "preparing" if run is key_prepare_tenant else "rotating"
    key = operator_pb2.TenantKey(
        tenant=TENANT, number=1, stage=stage, volumes=2, failure="no store"
    )

    async def answer(_request: object, **_: object) -> operator_pb2.TenantKey:
        return key

    calls = ("GetTenantKey", "PrepareTenantKey", "RotateTenantKey")
    client = SimpleNamespace(operator=SimpleNamespace(**dict.fromkeys(calls, answer)))
    options = argparse.Namespace(tenant=TENANT, wait=True, yes=True)
    with pytest.raises(UnavailableError) as caught:
        await run(cast("Client", client), options, Output("table", io.StringIO()))
    assert caught.value.reason == "broker.tenant_key.failed"
    assert "no store" in str(caught.value)
