"""`sealanectl subsystem VERB`: plain subsystems of a target."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict

from sealane.cli.names import find_subsystem, list_subsystems
from sealane.cli.output import CALL_SECONDS, Output, size_text, text_of
from sealane.cli.verbs import named, verb, watched
from sealane.client import Client, translated
from sealane.protocol.v1 import subsystems_pb2


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `subsystem`."""
    watched(verb(verbs, "list", _subsystem_list, "list every plain subsystem"))
    named(verbs, "get", _subsystem_get, "show a plain subsystem, by its NQN", find=find_subsystem)


async def _subsystem_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    output.show(
        [
            {
                "nqn": each.nqn,
                "hosts": list(each.host_nqns) or "any",
                "namespaces": len(each.namespaces),
                "size": size_text(sum(namespace.size_bytes for namespace in each.namespaces)),
                "controllers": len(each.controllers),
            }
            for each in await list_subsystems(client)
        ],
        things="subsystems",
    )


async def _subsystem_get(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = subsystems_pb2.GetSubsystemRequest(nqn=options.name)
    with translated():
        subsystem = await client.subsystems.GetSubsystem(request, timeout=CALL_SECONDS)
    row = MessageToDict(
        subsystem, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    output.show_one(row, _subsystem_rows(subsystem))


def _subsystem_rows(subsystem: subsystems_pb2.Subsystem) -> Mapping[str, Any]:
    rows: dict[str, Any] = {
        "nqn": subsystem.nqn,
        "serial": subsystem.serial,
        "hosts": list(subsystem.host_nqns) or "any",
    }
    for namespace in subsystem.namespaces:
        hosts = f", for {text_of(list(namespace.host_nqns))}" if namespace.host_nqns else ""
        rows[f"namespace {namespace.nsid}"] = (
            f"{size_text(namespace.size_bytes)}, {namespace.store}, {namespace.ana_state}, "
            f"{namespace.uuid}{hosts}"
        )
    for controller in subsystem.controllers:
        proved = "authenticated" if controller.authenticated else "not authenticated"
        rows[f"controller {controller.controller_id}"] = (
            f"{controller.host_nqn}, {controller.io_queues} I/O queues, {proved}"
        )
    return rows
