"""`sealanectl key rewrap`, `key rotate-record-key` and `key status`: the brokers' own keys."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from sealane.cli.output import CALL_SECONDS, Output
from sealane.cli.tenant_keys import data_of, replaced_keys, said_of
from sealane.cli.verbs import confirm, destructive, verb, watched
from sealane.cli.waiting import ended
from sealane.client import Client, translated
from sealane.errors import UnavailableError
from sealane.protocol.v1 import operator_pb2


async def key_rewrap(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Begin to wrap all stored keys under the broker's other key; `--wait`: until it has ended."""
    request = operator_pb2.RotateEncryptionKeyRequest(gone_instances=options.gone)
    with translated():
        keys = await client.operator.RotateEncryptionKey(request, timeout=CALL_SECONDS)
    if options.wait:
        keys = await ended(keys, _rewrap_left, partial(_status, client))
    _show(keys, output)


def _rewrap_left(keys: operator_pb2.EncryptionKeys) -> str:
    """Return what is left of a rotation of the key encryption key; empty: it has ended."""
    if not keys.previous_key_id:
        return ""
    if keys.failure:
        raise UnavailableError("broker.key.rewrap", f"keys are not wrapped: {keys.failure}")
    return f"{keys.left} of {keys.records} records left"


async def key_rotate_record_key(
    client: Client, options: argparse.Namespace, output: Output
) -> None:
    """Begin to replace the key for the MACs of records; `--wait`: until it has ended."""
    keys = await _status(client)
    if not keys.is_record_key_rotating:
        confirm(
            options,
            f"Record key {keys.record_key_number} will be replaced and then deleted. This can't be "
            "turned back, and brokers of releases before this one no longer open the store.",
        )
    # Names the one that was shown: if it was replaced meanwhile, no other replacement begins.
    number = keys.record_key_number - int(keys.is_record_key_rotating)
    request = operator_pb2.RotateRecordKeyRequest(number=number)
    with translated():
        keys = await client.operator.RotateRecordKey(request, timeout=CALL_SECONDS)
    if options.wait:
        keys = await ended(keys, _record_key_left, partial(_status, client))
    _show(keys, output)


def _record_key_left(keys: operator_pb2.EncryptionKeys) -> str:
    """Return what is left of a replacement of the record key; empty: it has ended."""
    if not keys.is_record_key_rotating:
        return ""
    if keys.record_key_failure:
        raise UnavailableError(
            "broker.record_key.failed", f"no record is written again: {keys.record_key_failure}"
        )
    return f"{keys.left_under_previous_record_key} records left"


async def key_status(client: Client, _options: argparse.Namespace, output: Output) -> None:
    """Print which keys of brokers are in use, and how far their rotations are."""
    _show(await _status(client), output, await replaced_keys(client))


async def _status(client: Client) -> operator_pb2.EncryptionKeys:
    with translated():
        return await client.operator.GetEncryptionKeys(
            operator_pb2.GetEncryptionKeysRequest(), timeout=CALL_SECONDS
        )


def _show(
    keys: operator_pb2.EncryptionKeys,
    output: Output,
    tenant_keys: Sequence[operator_pb2.TenantKey] | None = None,
) -> None:
    """Show the keys of brokers, and those of tenants if they were asked for."""
    if output.is_data:
        tenants = {} if tenant_keys is None else {"tenant_keys": [*map(data_of, tenant_keys)]}
        output.show_one(
            {
                "key_id": keys.key_id.hex(),
                "previous_key_id": keys.previous_key_id.hex(),
                "retired_key_ids": [each.hex() for each in keys.retired_key_ids],
                "records": keys.records,
                "left": keys.left,
                "failure": keys.failure,
                "record_key_number": keys.record_key_number,
                "is_record_key_rotating": keys.is_record_key_rotating,
                "left_under_previous_record_key": keys.left_under_previous_record_key,
                "record_key_failure": keys.record_key_failure,
                "brokers": [
                    {
                        "instance": broker.instance,
                        "node": broker.node,
                        "key_ids": [each.hex() for each in broker.key_ids],
                    }
                    for broker in keys.brokers
                ],
                **tenants,
            }
        )
        return
    rows: dict[str, Any] = {
        "key in use": keys.key_id.hex(),
        "key before": keys.previous_key_id.hex() or "none: no rotation is in progress",
        "records": keys.records,
        "under the key before": keys.left,
    }
    if keys.failure:
        rows["failure"] = keys.failure
    rows["record key"] = f"number {keys.record_key_number}" + (
        f", {keys.left_under_previous_record_key} records still under the one before"
        if keys.is_record_key_rotating
        else ""
    )
    if keys.record_key_failure:
        rows["failure (record key)"] = keys.record_key_failure
    retired = set(keys.retired_key_ids)
    for broker in keys.brokers:
        rows[f"broker {broker.instance} ({broker.node})"] = (
            ", ".join(
                each.hex() + (" (retired: remove it)" if each in retired else "")
                for each in broker.key_ids
            )
            or "no key announced"
        )
    for key in tenant_keys or ():
        rows[f"key of tenant {key.tenant}"] = said_of(key)
        if key.failure:
            rows["failure (tenants' keys)"] = key.failure
    output.show_one(rows)


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `key` about brokers' own keys."""
    rewrap = verb(
        verbs, "rewrap", key_rewrap, "wrap all stored keys under the broker's next encryption key"
    )
    rewrap.add_argument(
        "--gone",
        action="append",
        type=int,
        default=[],
        metavar="INSTANCE",
        help="a broker instance that will never start again, so needn't have the key; repeatable",
    )
    rewrap.add_argument("--wait", action="store_true", help="wait until no key is left")
    rotate = verb(
        verbs,
        "rotate-record-key",
        key_rotate_record_key,
        "replace the key for the MACs of the brokers' records",
    )
    rotate.add_argument(
        "--wait", action="store_true", help="wait until no record is under the key before"
    )
    destructive(rotate)
    watched(verb(verbs, "status", key_status, "show which keys of brokers and tenants are in use"))
