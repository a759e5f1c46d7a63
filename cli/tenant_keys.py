"""`sealanectl key prepare-tenant` and `key rotate-tenant`: rotation of a tenant's key."""

import argparse
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, Final

from sealane.cli.output import CALL_SECONDS, Output, pages
from sealane.cli.verbs import confirm, destructive, verb
from sealane.cli.waiting import ended
from sealane.client import Client, translated
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.kinds import TenantKeyStage
from sealane.protocol.v1 import operator_pb2

_REPLACING = {TenantKeyStage.PREPARING, TenantKeyStage.PREPARED}
"""Stages in which the present key has a number that `prepare-tenant` has given it."""

EXHAUSTED_NAMED: Final = 4
"""Volumes without key epochs left that a text names; data names those that the broker does."""


async def key_prepare_tenant(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Make a tenant's next key; `--wait`: until all its volumes are ready for it."""
    key = await _asked(client, options.tenant)
    # Names the one that was shown: if it was replaced meanwhile, no other replacement begins.
    number = key.number - int(key.stage in _REPLACING)
    request = operator_pb2.PrepareTenantKeyRequest(tenant=options.tenant, number=number)
    with translated():
        key = await client.operator.PrepareTenantKey(request, timeout=CALL_SECONDS)
    if options.wait:
        key = await ended(key, _unready, partial(_asked, client, options.tenant))
    _show(key, output)


def _unready(key: operator_pb2.TenantKey) -> str:
    """Return what is left to be ready; empty: nothing is."""
    if key.stage != TenantKeyStage.PREPARING:
        return ""
    _check_failure(key)
    return f"{key.ready} of {key.volumes} volumes ready"


async def key_rotate_tenant(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Have a tenant's volumes begin a key epoch of its prepared key; `--wait`: until all have."""
    key = await _asked(client, options.tenant)
    if not key.stage and key.number:
        # It has ended: whoever repeats the command must not be led to begin another one.
        _show(key, output)
        return
    if key.stage in {"", TenantKeyStage.PREPARING}:
        # Refused here, too: brokers may end the preparation before they are asked, and then the
        # rotation would begin without the question and without a snapshot.
        raise UsageError(
            "broker.tenant_key.not_prepared",
            f"tenant {key.tenant} has key {key.number}: "
            + (f"{_unready(key)}, wait" if key.stage else "prepare the next one first"),
        )
    if key.stage == TenantKeyStage.PREPARED:
        confirm(
            options,
            f"{key.volumes - key.rotated} volumes of tenant {key.tenant} will begin a key epoch of "
            f"its key {key.number}; sectors that are sealed stay under their key. A snapshot from "
            "before the preparation can't open what is sealed from now on: take one first.",
        )
    request = operator_pb2.RotateTenantKeyRequest(tenant=options.tenant, number=key.number)
    with translated():
        key = await client.operator.RotateTenantKey(request, timeout=CALL_SECONDS)
    if options.wait:
        key = await ended(key, _unrotated, partial(_asked, client, options.tenant))
    _show(key, output)
    if options.wait and key.stage == TenantKeyStage.INCOMPLETE:
        raise UnavailableError(
            "broker.tenant_key.incomplete",
            f"{key.exhausted_volumes} volumes of tenant {key.tenant} have no key epochs left and "
            f"stay under its former key: {_exhausted(key)}",
        )


def _unrotated(key: operator_pb2.TenantKey) -> str:
    """Return what is left to be rotated; empty: nothing is, or nothing can."""
    if key.stage != TenantKeyStage.ROTATING:
        return ""
    _check_failure(key)
    return f"{key.rotated} of {key.volumes} volumes rotated"


def _check_failure(key: operator_pb2.TenantKey) -> None:
    if key.failure:
        raise UnavailableError("broker.tenant_key.failed", f"the broker can't go on: {key.failure}")


async def _asked(client: Client, tenant: str) -> operator_pb2.TenantKey:
    with translated():
        return await client.operator.GetTenantKey(
            operator_pb2.GetTenantKeyRequest(tenant=tenant), timeout=CALL_SECONDS
        )


async def replaced_keys(client: Client) -> list[operator_pb2.TenantKey]:
    """Return the keys of the tenants whose key was ever replaced."""

    def call(token: str) -> Awaitable[operator_pb2.ListTenantKeysResponse]:
        request = operator_pb2.ListTenantKeysRequest(page_token=token)
        return client.operator.ListTenantKeys(request, timeout=CALL_SECONDS)

    with translated():
        return [key async for page in pages(call) for key in page.tenant_keys]


def data_of(key: operator_pb2.TenantKey) -> Mapping[str, Any]:
    """Return a tenant's key as data."""
    return {
        "tenant": key.tenant,
        "number": key.number,
        "stage": key.stage,
        "volumes": key.volumes,
        "ready": key.ready,
        "rotated": key.rotated,
        "exhausted_volumes": key.exhausted_volumes,
        "exhausted_volume_ids": list(key.exhausted_volume_ids),
        "former_numbers": list(key.former_numbers),
        "failure": key.failure,
    }


def said_of(key: operator_pb2.TenantKey) -> str:
    """Return how far the rotation of a tenant's key is, in one line."""
    said = f"number {key.number}"
    match key.stage:
        case TenantKeyStage.PREPARING:
            said += f", {key.ready} of {key.volumes} volumes ready"
        case TenantKeyStage.PREPARED:
            said += ", prepared: take a snapshot, then rotate"
        case TenantKeyStage.ROTATING:
            said += f", {key.rotated} of {key.volumes} volumes rotated"
        case TenantKeyStage.INCOMPLETE:
            said += (
                f", incomplete: no key epochs left for {key.exhausted_volumes} volumes, "
                + _exhausted(key)
            )
    if key.former_numbers:
        said += f"; former keys kept: {', '.join(map(str, key.former_numbers))}"
    return said


def _exhausted(key: operator_pb2.TenantKey) -> str:
    """Name volumes that have no key epochs left, a few if they are many."""
    named = key.exhausted_volume_ids[:EXHAUSTED_NAMED]
    return ", ".join([*named, *["…"][: key.exhausted_volumes - len(named)]])


def _show(key: operator_pb2.TenantKey, output: Output) -> None:
    table = {"tenant": key.tenant, "key": said_of(key)}
    if key.failure:
        table["failure"] = key.failure
    if key.stage in _REPLACING:
        first = "" if key.stage == TenantKeyStage.PREPARED else "when all volumes are ready: "
        table["next"] = (
            f"{first}sealanectl broker snapshot FILE --to RECIPIENT, keep it, then "
            f"sealanectl key rotate-tenant {key.tenant}"
        )
    output.show_one(data_of(key), table)


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `key` about tenants' keys."""
    prepare = verb(
        verbs,
        "prepare-tenant",
        key_prepare_tenant,
        "make a tenant's next key; take a snapshot of the store before the rotation",
    )
    rotate = verb(
        verbs,
        "rotate-tenant",
        key_rotate_tenant,
        "have a tenant's volumes begin a key epoch of its prepared key",
    )
    for each, text in [(prepare, "ready for it"), (rotate, "under it, or can't be")]:
        each.add_argument("tenant", metavar="TENANT", help="name of the tenant, as in policies")
        each.add_argument("--wait", action="store_true", help=f"wait until all volumes are {text}")
    destructive(rotate)
