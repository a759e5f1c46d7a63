"""`sealanectl NOUN VERB`: command-line client of the daemon on this machine."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import asyncio
import contextlib
import dataclasses
import datetime as dt
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from sealane import __version__
from sealane.client import Client, NodeStatus, Volume, VolumeEvent, connect, translated
from sealane.client.connection import DEFAULT_SOCKET
from sealane.crypto.evidence.software import SoftwareKey
from sealane.crypto.keys import KEY_BYTES
from sealane.daemon.arguments import OneLineParser
from sealane.daemon.broker.kek import make_hsm_key
from sealane.daemon.config import HsmConfig
from sealane.daemon.ctl_attest import add_attest_noun
from sealane.daemon.ctl_broker import add_broker_verbs
from sealane.daemon.ctl_collateral import add_collateral_verbs
from sealane.daemon.ctl_machine import add_machine_verb
from sealane.daemon.ctl_nodes import add_node_verbs
from sealane.daemon.ctl_output import CALL_SECONDS, Output, pages, text_of
from sealane.daemon.ctl_trust import add_trust_nouns
from sealane.daemon.ctl_volume_io import add_range, volume_read, volume_write
from sealane.daemon.files import read_bounded
from sealane.errors import Error, UsageError
from sealane.protocol.v1 import sessions_pb2, subsystems_pb2

_SIZE_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

Command = Callable[[Client, argparse.Namespace, Output], Awaitable[None]]


def main(arguments: list[str] | None = None) -> int:
    """Run `sealanectl`; returns 0 ok, 1 failed, 2 usage, 3 not verified, 4 unavailable."""
    options = _parser().parse_args(arguments)
    output = Output(options.output)
    try:
        if options.is_offline:
            options.run(options, output)
        else:
            asyncio.run(_call(options, output))
    except Error as error:
        print(f"sealanectl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output went away; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


async def _call(options: argparse.Namespace, output: "Output") -> None:
    async with connect(options.socket) as client:
        run: Command = options.run
        await run(client, options, output)


async def _volume_create(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.create(
        size_bytes=options.size,
        display_name=options.display_name,
        target_node=options.target,
        third_party=options.third_party,
        mode=options.mode,
    )
    if options.wait:
        volume = await client.volumes.wait_filled(volume.name, progress=_show_progress)
    _show_volume(volume, output)


def _show_progress(volume: Volume) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{_state(volume)}  ")
        sys.stderr.flush()


def _state(volume: Volume) -> str:
    if volume.state != "filling":
        return volume.state
    return f"filling, {100 * volume.filled_bytes // volume.size_bytes} %"


async def _volume_get(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.get(options.name)
    _show_volume(volume, output)


async def _volume_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    volumes = await client.volumes.list()
    if output.form == "json":
        output.show([dataclasses.asdict(v) for v in volumes])
        return
    output.show([_brief(v) for v in volumes])


def _brief(volume: Volume) -> Mapping[str, Any]:
    a = volume.attachment
    return {
        "name": volume.name,
        "display name": volume.display_name,
        "size": _size(volume.size_bytes),
        "target": volume.target_node,
        "state": _state(volume),
        "export": f"{a.traddr}:{a.trsvcid}" if a is not None else "",
        "refusals": a.refusals if a is not None else "",
    }


def _full(volume: Volume) -> Mapping[str, Any]:
    rows: dict[str, Any] = {
        "name": volume.name,
        "display name": volume.display_name,
        "size": f"{_size(volume.size_bytes)} ({volume.size_bytes} bytes)",
        "target": volume.target_node,
        "state": _state(volume),
        "mode": volume.mode,
        "third party": volume.third_party,
        "claims that hold": volume.claims,
        "freshness": volume.freshness,
        "key epoch": volume.key_epoch,
    }
    a = volume.attachment
    if a is not None:
        rows |= {
            "export": f"{a.traddr}:{a.trsvcid}, namespace {a.namespace_id}",
            "subsystem NQN": a.subsystem_nqn,
            "host NQN": a.host_nqn,
            "sectors sealed": a.sectors_sealed,
            "sectors opened": a.sectors_opened,
            "counters": f"{a.counters_used} used of {a.counters_leased} leased",
            "refusals": a.refusals,
        }
    return rows


def _show_volume(volume: Volume, output: Output) -> None:
    output.show_one(dataclasses.asdict(volume), _full(volume))


def _size(size_bytes: int) -> str:
    units = ("TiB", "GiB", "MiB", "KiB")
    unit = next((u for u in units if size_bytes >= _SIZE_UNITS[u]), "KiB")
    return f"{size_bytes / _SIZE_UNITS[unit]:.4g} {unit}"


async def _volume_delete(client: Client, options: argparse.Namespace, output: Output) -> None:
    await client.volumes.delete(options.name)


async def _volume_attach(client: Client, options: argparse.Namespace, output: Output) -> None:
    traddr, trsvcid = options.via
    with contextlib.ExitStack() as on_error:
        if options.secret_file is not None:
            # Before there is a secret, which is told only once: what can't be written is said now.
            _write_secret(options.secret_file, b"")
            on_error.callback(options.secret_file.unlink, missing_ok=True)
        volume = await client.volumes.attach(
            options.name, host_nqn=options.host_nqn, via_traddr=traddr, via_trsvcid=trsvcid
        )
        a = volume.attachment
        if a is None:
            raise UsageError("volume.attached.state", f"{volume.name} was detached meanwhile")
        on_error.pop_all()
    secret = a.dhchap_secret
    if options.secret_file is not None:
        options.secret_file.write_text(f"{secret}\n")
        secret = f"$(cat {shlex.quote(str(options.secret_file))})"
        volume = dataclasses.replace(volume, attachment=dataclasses.replace(a, dhchap_secret=""))
    command = (
        f"nvme connect --transport tcp --traddr {a.traddr} --trsvcid {a.trsvcid} "
        f'--nqn {a.subsystem_nqn} --hostnqn {shlex.quote(a.host_nqn)} --dhchap-secret "{secret}"'
    )
    output.show_one(
        dataclasses.asdict(volume) | {"nvme_connect": command},
        {**_full(volume), "connect with": command},
    )


async def _volume_detach(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.detach(options.name)
    _show_volume(volume, output)


async def _volume_watch(client: Client, options: argparse.Namespace, output: Output) -> None:
    async with client.volumes.watch(options.name) as events:
        async for event in events:
            output.line(_event_row(event))


def _event_row(event: VolumeEvent) -> Mapping[str, Any]:
    return {
        "time": event.time,
        "origin": event.origin,
        "kind": event.kind,
        "reason": event.reason,
        "lba": event.lba,
        "detail": event.detail,
    }


async def _session_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    def call(token: str) -> Awaitable[sessions_pb2.ListSessionsResponse]:
        request = sessions_pb2.ListSessionsRequest(page_token=token)
        return client.sessions.ListSessions(request, timeout=CALL_SECONDS)

    with translated():
        output.show([_session_row(s) async for page in pages(call) for s in page.sessions])


async def _session_get(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = sessions_pb2.GetSessionRequest(name=options.name)
    with translated():
        session = await client.sessions.GetSession(request, timeout=CALL_SECONDS)
    row = MessageToDict(
        session, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    output.show_one(row)


async def _session_close(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = sessions_pb2.CloseSessionRequest(name=options.name)
    with translated():
        await client.sessions.CloseSession(request, timeout=CALL_SECONDS)


def _session_row(session: sessions_pb2.Session) -> Mapping[str, Any]:
    return {
        "name": session.name,
        "display_name": session.display_name,
        "state": sessions_pb2.Session.State.Name(session.state).lower(),
        "peer": session.peer_node,
        "direction": session.direction,
        "rate_bits_per_second": session.rate_bits_per_second,
        "packets_sent": session.statistics["packets_sent"],
        "retransmitted_packets": session.statistics["retransmitted_packets"],
        "close_reason": session.close_reason,
    }


async def _subsystem_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    request = subsystems_pb2.ListSubsystemsRequest()
    with translated():
        page = await client.subsystems.ListSubsystems(request, timeout=CALL_SECONDS)
    output.show(
        [
            {
                "nqn": each.nqn,
                "hosts": list(each.host_nqns) or "any",
                "namespaces": len(each.namespaces),
                "size": _size(sum(namespace.size_bytes for namespace in each.namespaces)),
                "controllers": len(each.controllers),
            }
            for each in page.subsystems
        ]
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
            f"{_size(namespace.size_bytes)}, {namespace.store}, {namespace.ana_state}, "
            f"{namespace.uuid}{hosts}"
        )
    for controller in subsystem.controllers:
        proved = "authenticated" if controller.authenticated else "not authenticated"
        rows[f"controller {controller.controller_id}"] = (
            f"{controller.host_nqn}, {controller.io_queues} I/O queues, {proved}"
        )
    return rows


async def _status(client: Client, options: argparse.Namespace, output: Output) -> None:
    status = await client.status()
    output.show_one(dataclasses.asdict(status), _status_rows(status, dt.datetime.now(dt.UTC)))


def _status_rows(status: NodeStatus, now: dt.datetime) -> Mapping[str, Any]:
    evidence = status.evidence_driver or "none (the broker's own certificates)"
    rows: dict[str, Any] = {
        "node": status.node,
        "version": status.version,
        "roles": status.roles,
        "evidence": evidence,
    }
    if status.is_development:
        rows["WARNING"] = (
            "DEVELOPMENT ONLY: software evidence proves a key file and nothing about a machine"
        )
    expires = status.certificate_expires
    if expires is not None:
        left = int((expires - now).total_seconds())
        rows["certificate"] = (
            f"until {text_of(expires)}, {left} s left"
            if left > 0
            else f"EXPIRED at {text_of(expires)}"
        )
    rows["started"] = status.started
    rows |= {f"address of {name}": a for name, a in sorted(status.addresses.items())}
    return rows


def _key_attestation(options: argparse.Namespace, output: Output) -> None:
    key = SoftwareKey.create()
    _write_secret(options.path, key.pem())
    output.show_one({"path": str(options.path), "fingerprint": key.fingerprint})


def _key_encryption(options: argparse.Namespace, output: Output) -> None:
    _write_secret(options.path, secrets.token_bytes(KEY_BYTES))
    output.show_one({"path": str(options.path)})


def _key_hsm(options: argparse.Namespace, output: Output) -> None:
    place = HsmConfig(
        module=options.module, token=options.token, label=options.label, pin_file=options.pin_file
    )
    make_hsm_key(place)
    output.show_one({"token": place.token, "label": place.label})


def _key_fingerprint(options: argparse.Namespace, output: Output) -> None:
    try:
        pem = read_bounded(options.path)
    except OSError as error:
        raise UsageError("key.unreadable", f"{options.path}: {error.strerror}") from error
    key = SoftwareKey.parse(pem, source=str(options.path))
    output.show_one({"path": str(options.path), "fingerprint": key.fingerprint})


def _write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; never replaces one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError("key.unwritable", f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def parse_size(text: str) -> int:
    """Return bytes for "4096", "64MiB", "1.5GiB" …; a multiple of 4096 comes out or an error."""
    digits = text.rstrip("KMGTiB")
    unit = _SIZE_UNITS.get(text[len(digits) :])
    try:
        size = float(digits) * unit if unit is not None else -1.0
    except ValueError:
        size = -1.0
    if not 4096 <= size < 2**63 or size % 4096:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: a multiple of 4096 bytes, as a number or with KiB, MiB, GiB, TiB"
        )
    return int(size)


def parse_via(text: str) -> tuple[str, int]:
    """Return address and port of "192.0.2.1:4420" or "[2001:db8::1]:4420"."""
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not is_number or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: host:port, port 1…65535")
    return host.strip("[]"), int(port)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="sealanectl", description="Talks to the sealaned on this machine.")
    parser.set_defaults(is_offline=False)
    parser.add_argument(
        "--socket", default=DEFAULT_SOCKET, metavar="PATH", help="default: %(default)s"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--version", action="version", version=f"sealanectl {__version__}")
    nouns = parser.add_subparsers(dest="noun", required=True, metavar="NOUN")

    verbs = _noun(nouns, "volume", "attested volumes")
    create = _verb(verbs, "create", _volume_create, "make a volume")
    create.add_argument("--size", type=parse_size, required=True, help="as in 4096 or 64MiB")
    create.add_argument("--display-name", default="")
    create.add_argument("--target", default="", help="target node (default: the gateway's)")
    create.add_argument(
        "--third-party",
        default="",
        metavar="NAME",
        help="on this [[gateway.third_party]] instead of a target of ours: mode local, "
        "see docs/third-party.md for what then holds",
    )
    create.add_argument(
        "--mode",
        default="",
        choices=("remote", "local", "off"),
        help="off: nobody keeps freshness, so an older sector put back by the store is not "
        "noticed; such a volume is filled before it can be attached (default: remote, or local "
        "with a third party)",
    )
    create.add_argument("--wait", action="store_true", help="until the volume is filled")
    _named(verbs, "get", _volume_get, "show a volume")
    _verb(verbs, "list", _volume_list, "show every volume")
    _named(verbs, "delete", _volume_delete, "delete a volume and its data")
    attach = _named(verbs, "attach", _volume_attach, "export a volume to one host")
    attach.add_argument(
        "--secret-file", type=Path, help="file for the host's secret, instead of showing it"
    )
    attach.add_argument("--host-nqn", required=True, help="NQN of the host that may connect")
    attach.add_argument(
        "--via",
        type=parse_via,
        default=("", 0),
        metavar="HOST:PORT",
        help="data path to the target",
    )
    _named(verbs, "detach", _volume_detach, "stop exporting a volume")
    read = _named(verbs, "read", volume_read, "copy bytes of a detached volume to standard output")
    add_range(read, length_default="to the end")
    write = _named(verbs, "write", volume_write, "copy standard input to a detached volume")
    add_range(write, length_default="what standard input has")
    _named(verbs, "watch", _volume_watch, "print a volume's events until interrupted")

    verbs = _noun(nouns, "session", "inter-datacenter sessions")
    _verb(verbs, "list", _session_list, "show every session")
    _named(verbs, "get", _session_get, "show a session")
    _named(verbs, "close", _session_close, "close a session")

    verbs = _noun(nouns, "subsystem", "plain subsystems of a target")
    _verb(verbs, "list", _subsystem_list, "show every plain subsystem")
    _named(verbs, "get", _subsystem_get, "show a plain subsystem, by its NQN")

    add_node_verbs(_noun(nouns, "node", "nodes of a broker: who attested, who is revoked"), _verb)

    status = nouns.add_parser("status", help="what the daemon is")
    status.set_defaults(run=_status)

    verbs = _noun(nouns, "key", "key files, which need no daemon, and keys of volumes")
    for verb, run, text in (
        ("attestation", _key_attestation, "make a software attestation key"),
        ("encryption", _key_encryption, "make a broker's key encryption key"),
        ("fingerprint", _key_fingerprint, "print how a policy names an attestation key"),
    ):
        made = verbs.add_parser(verb, help=text)
        made.add_argument("path", type=Path, metavar="PATH")
        made.set_defaults(run=run, is_offline=True)
    made = verbs.add_parser("hsm", help="make a broker's key encryption key in a PKCS #11 token")
    for option, text in (
        ("module", "the token's PKCS #11 library"),
        ("token", "label of the token"),
        ("label", "label of the new key"),
        ("pin-file", "file with the user PIN"),
    ):
        made.add_argument(f"--{option}", required=True, help=text)
    made.set_defaults(run=_key_hsm, is_offline=True)
    leases = _noun(nouns, "lease", "counter leases of a broker")
    add_broker_verbs(verbs, leases, _verb)
    add_machine_verb(add_attest_noun(nouns, _noun))
    add_trust_nouns(nouns, _noun, _verb)
    collateral = _noun(nouns, "collateral", "what vendors publish of their hardware")
    add_collateral_verbs(collateral)
    return parser


def _noun(nouns: Any, name: str, text: str) -> Any:
    return nouns.add_parser(name, help=text).add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )


def _verb(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.set_defaults(run=run)
    return parser


def _named(verbs: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser = _verb(verbs, name, run, text)
    parser.add_argument("name", metavar="NAME", help="resource name, as create prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
