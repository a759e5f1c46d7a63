"""`sealanectl volume VERB`: the gateway's volumes."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sealane.cli.names import find_volume, list_registered
from sealane.cli.output import SIZE_UNITS, Output, size_text
from sealane.cli.registered_volumes import show_registered
from sealane.cli.verbs import confirm, destructive, named, verb, watched
from sealane.cli.volume_io import add_range, volume_read, volume_write
from sealane.cli.volume_jobs import add_job_verbs, health_text, store_rows
from sealane.client import Client, Volume, VolumeEvent, VolumeShare
from sealane.crypto.roles import Role
from sealane.daemon.runtime.files import write_secret
from sealane.errors import UsageError
from sealane.protocol.kinds import AnchorKind, VolumeMode
from sealane.protocol.sector import SECTOR_BYTES


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `volume`."""
    create = verb(verbs, "create", _volume_create, "create a volume")
    create.add_argument("--size", type=parse_size, required=True, help="such as 4096 or 64MiB")
    create.add_argument("--display-name", default="", help="name for people")
    create.add_argument(
        "--target",
        default="",
        help="one of the gateway's targets (default: of those that serve and aren't being drained, "
        "the one with most room)",
    )
    create.add_argument(
        "--third-party",
        default="",
        metavar="NAME",
        help="use this [[gateway.third_party]] instead of a Sealane target, with mode local; "
        "docs/operate/third-party.md says what that protects",
    )
    create.add_argument(
        "--mode",
        default="",
        choices=[*VolumeMode],
        help="who checks that sectors are fresh: the target (remote), the gateway (local) or "
        "nobody (off): then an old sector returned by the store goes unnoticed, and the volume "
        "is filled before it can be attached (default: remote, or local with --third-party)",
    )
    create.add_argument(
        "--anchor",
        default="",
        choices=(str(AnchorKind.BROKER), str(AnchorKind.NONE)),
        help="with --third-party: who remembers the volume's state while it is detached; none: "
        "the volume as a whole can be rolled back unnoticed (default: broker)",
    )
    create.add_argument("--wait", action="store_true", help="wait until the volume is filled")
    named(verbs, "get", _volume_get, "show a volume", find=find_volume)
    text = "list every volume: a gateway's tenant's, or a broker's of all tenants"
    watched(verb(verbs, "list", _volume_list, text))
    destructive(
        named(verbs, "delete", _volume_delete, "delete a volume and its data", find=find_volume)
    )
    attach = named(verbs, "attach", _volume_attach, "export a volume to one host", find=find_volume)
    attach.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="write the host's secret to this new file instead of showing it",
    )
    attach.add_argument("--host-nqn", required=True, help="NQN of the host that may connect")
    attach.add_argument(
        "--via",
        type=parse_via,
        default=("", 0),
        metavar="HOST:PORT",
        help="connect to the target through this address",
    )
    attach.add_argument(
        "--fail-over",
        action="store_true",
        help="as one of several gateways that serve the host, one at a time",
    )
    take_over = named(
        verbs,
        "takeover",
        _volume_take_over,
        "serve a volume's host here, and fence the gateway that served it",
        find=find_volume,
    )
    destructive(take_over)
    take_over.add_argument(
        "--accept-loss",
        action="store_true",
        help="even if acknowledged writes may be lost that only the other gateway still has",
    )
    named(verbs, "detach", _volume_detach, "stop exporting a volume", find=find_volume)
    share = named(
        verbs,
        "share",
        _volume_share,
        "let another tenant's gateways use a volume",
        find=find_volume,
    )
    share.add_argument("--read-only", action="store_true", help="allow reads only")
    unshare = named(
        verbs,
        "unshare",
        _volume_unshare,
        "stop sharing a volume; starts a new key epoch",
        find=find_volume,
    )
    for parser_of_share in (share, unshare):
        parser_of_share.add_argument("--tenant", required=True, help="tenant, as policies name it")
    read = named(
        verbs,
        "read",
        volume_read,
        "copy bytes of a detached volume to standard output",
        find=find_volume,
    )
    add_range(read, length_default="to the volume's end")
    write = named(
        verbs, "write", volume_write, "copy standard input to a detached volume", find=find_volume
    )
    add_range(write, length_default="all of standard input")
    named(
        verbs, "watch", _volume_watch, "print a volume's events until interrupted", find=find_volume
    )
    add_job_verbs(verbs)
    resize = named(verbs, "resize", _volume_resize, "make a volume larger", find=find_volume)
    resize.add_argument("--size", type=parse_size, required=True, help="new size, such as 16GiB")
    named(
        verbs,
        "clone",
        _volume_clone,
        "always refused: sectors are bound to their volume",
        find=find_volume,
    )


async def _volume_create(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.create(
        size_bytes=options.size,
        display_name=options.display_name,
        target_node=options.target,
        third_party=options.third_party,
        mode=options.mode,
        anchor=options.anchor,
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
        a = volume.attachment
        return f"{volume.state}, {a.fail_over}" if a is not None and a.fail_over else volume.state
    return f"filling, {100 * volume.filled_bytes // volume.size_bytes} %"


async def _volume_get(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.get(options.name, with_store=True)
    _show_volume(volume, output)


async def _volume_resize(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.resize(options.name, size_bytes=options.size)
    _show_volume(volume, output)


async def _volume_clone(client: Client, options: argparse.Namespace, output: Output) -> None:
    await client.volumes.clone(options.name)


async def _volume_list(client: Client, options: argparse.Namespace, output: Output) -> None:
    roles = (await client.status()).roles
    if Role.BROKER in roles and Role.GATEWAY not in roles:
        show_registered(await list_registered(client), output)
        return
    volumes = await client.volumes.list(with_store=True)
    output.show(
        [dataclasses.asdict(v) for v in volumes],
        [_brief(v) for v in volumes],
        wide=[wide_row(v) for v in volumes],
        things="volumes",
    )


def _brief(volume: Volume) -> Mapping[str, Any]:
    a = volume.attachment
    return {
        "name": volume.name,
        "display name": volume.display_name,
        "size": size_text(volume.size_bytes),
        "target": volume.target_node,
        "state": _state(volume),
        "health": health_text(volume.store) if volume.store else volume.store_unknown,
        "export": f"{a.traddr}:{a.trsvcid}" if a is not None else "",
        "refusals": a.refusals if a is not None else "",
    }


def wide_row(volume: Volume) -> Mapping[str, Any]:
    """Return a volume as a row of the wide list."""
    a = volume.attachment
    return {
        **_brief(volume),
        "mode": volume.mode,
        "tenant": volume.tenant,
        "key epoch": volume.key_epoch,
        "host": a.host_nqn if a is not None else "",
    }


def _full(volume: Volume) -> Mapping[str, Any]:
    rows: dict[str, Any] = {
        "name": volume.name,
        "display name": volume.display_name,
        "size": f"{size_text(volume.size_bytes)} ({volume.size_bytes} bytes)",
        "target": volume.target_node,
        "state": _state(volume),
        "mode": volume.mode,
        "third party": volume.third_party,
        "claims that hold": volume.claims,
        "freshness": volume.freshness,
        "anchor": volume.anchor,
        "key epoch": volume.key_epoch,
        "tenant": volume.tenant,
        "access": "read only" if volume.is_read_only else "",
        "shared with": [_share(share) for share in volume.shares],
    }
    rows = {name: value for name, value in rows.items() if value not in ("", [])}
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
        if a.fail_over:
            rows["fail-over"] = a.fail_over
    return rows | store_rows(volume)


def _share(share: VolumeShare) -> str:
    return f"{share.tenant} (read only)" if share.is_read_only else share.tenant


def _show_volume(volume: Volume, output: Output) -> None:
    output.show_one(dataclasses.asdict(volume), _full(volume))


async def _volume_delete(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.get(options.name)
    called = f" ({volume.display_name})" if volume.display_name else ""
    confirm(
        options,
        f"{volume.name}{called}, {size_text(volume.size_bytes)}: its data and its keys will be "
        "destroyed.",
    )
    await client.volumes.delete(options.name)


async def _volume_take_over(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.get(options.name)
    loss = " Acknowledged writes may be lost." if options.accept_loss else ""
    confirm(
        options,
        f"{volume.name}: the gateway that serves its host is fenced, and this one serves it.{loss}",
    )
    _show_volume(
        await client.volumes.take_over(options.name, accept_loss=options.accept_loss), output
    )


async def _volume_attach(client: Client, options: argparse.Namespace, output: Output) -> None:
    traddr, trsvcid = options.via
    with contextlib.ExitStack() as on_error:
        if options.secret_file is not None:
            # The secret is returned only once: find out before that if the file can't be written.
            write_secret(options.secret_file, b"")
            on_error.callback(options.secret_file.unlink, missing_ok=True)
        volume = await client.volumes.attach(
            options.name,
            host_nqn=options.host_nqn,
            via_traddr=traddr,
            via_trsvcid=trsvcid,
            fail_over=options.fail_over,
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


async def _volume_share(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.share(
        options.name, tenant=options.tenant, read_only=options.read_only
    )
    _show_volume(volume, output)


async def _volume_unshare(client: Client, options: argparse.Namespace, output: Output) -> None:
    volume = await client.volumes.unshare(options.name, tenant=options.tenant)
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


def parse_size(text: str) -> int:
    """Return bytes for "4096", "64MiB", "1.5GiB" …; ArgumentTypeError if no multiple of 4096."""
    digits = text.rstrip("KMGTPiB")
    unit = SIZE_UNITS.get(text[len(digits) :])
    try:
        size = float(digits) * unit if unit is not None else -1.0
    except ValueError:
        size = -1.0
    if not SECTOR_BYTES <= size < 2**63 or size % SECTOR_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: a multiple of {SECTOR_BYTES} bytes, as a number or with KiB to PiB"
        )
    return int(size)


def parse_via(text: str) -> tuple[str, int]:
    """Return address and port of "192.0.2.1:4420" or "[2001:db8::1]:4420"; ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not is_number or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: host:port, port 1…65535")
    return host.strip("[]"), int(port)
