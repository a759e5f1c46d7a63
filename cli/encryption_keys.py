"""`sealanectl key rewrap` and `key status`: the brokers' key encryption key."""

import argparse
import asyncio
import sys
from typing import Any, Final

from sealane.cli.output import CALL_SECONDS, Output
from sealane.cli.verbs import verb, watched
from sealane.client import Client, translated
from sealane.errors import UnavailableError
from sealane.protocol.v1 import operator_pb2

WAIT_SECONDS: Final = 1.0
"""Interval at which `--wait` asks."""


async def key_rewrap(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Begin to wrap all stored keys under the broker's other key; `--wait`: until it has ended."""
    request = operator_pb2.RotateEncryptionKeyRequest(gone_instances=options.gone)
    with translated():
        keys = await client.operator.RotateEncryptionKey(request, timeout=CALL_SECONDS)
    while options.wait and keys.previous_key_id:
        if keys.failure:
            raise UnavailableError("broker.key.rewrap", f"keys are not wrapped: {keys.failure}")
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{keys.left} of {keys.records} records left ")
            sys.stderr.flush()
        await asyncio.sleep(WAIT_SECONDS)
        keys = await _status(client)
    if options.wait and sys.stderr.isatty():
        sys.stderr.write("\n")
    _show(keys, output)


async def key_status(client: Client, _options: argparse.Namespace, output: Output) -> None:
    """Print which key encryption keys are in use, and how far a rotation is."""
    _show(await _status(client), output)


async def _status(client: Client) -> operator_pb2.EncryptionKeys:
    with translated():
        return await client.operator.GetEncryptionKeys(
            operator_pb2.GetEncryptionKeysRequest(), timeout=CALL_SECONDS
        )


def _show(keys: operator_pb2.EncryptionKeys, output: Output) -> None:
    if output.is_data:
        output.show_one(
            {
                "key_id": keys.key_id.hex(),
                "previous_key_id": keys.previous_key_id.hex(),
                "retired_key_ids": [each.hex() for each in keys.retired_key_ids],
                "records": keys.records,
                "left": keys.left,
                "failure": keys.failure,
                "brokers": [
                    {
                        "instance": broker.instance,
                        "node": broker.node,
                        "key_ids": [each.hex() for each in broker.key_ids],
                    }
                    for broker in keys.brokers
                ],
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
    retired = set(keys.retired_key_ids)
    for broker in keys.brokers:
        rows[f"broker {broker.instance} ({broker.node})"] = (
            ", ".join(
                each.hex() + (" (retired: remove it)" if each in retired else "")
                for each in broker.key_ids
            )
            or "no key announced"
        )
    output.show_one(rows)


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `key` about key encryption keys at a broker."""
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
    watched(verb(verbs, "status", key_status, "show which key encryption keys are in use"))
