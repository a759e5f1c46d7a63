"""Attached volumes and their hosts."""

import asyncio
import secrets
from collections.abc import Callable

from patience import PATIENCE_SECONDS
from sealane.client import Client, Volume
from sealane.daemon.gateway.data_path import AttachedVolume
from sealane.errors import UsageError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import ControllerEvent, HostController


def new_secret() -> HostSecret:
    """Return a host's secret for an attachment."""
    return HostSecret.generate(secrets.token_bytes)


def host_of(attached: AttachedVolume, host_nqn: str) -> HostController:
    """Return a host with this secret, not connected yet."""
    export = attached.export
    return HostController(
        traddr=export.traddr,
        trsvcid=export.trsvcid,
        subsystem_nqn=export.subsystem_nqn,
        host_nqn=host_nqn,
        credentials=Credentials(secret=attached.secret),
    )


def host_at(
    volume: Volume,
    host_nqn: str,
    *,
    events: Callable[[ControllerEvent], None] | None = None,
) -> HostController:
    """Return the host of a volume that was attached by a client, not connected yet."""
    at = volume.attachment
    assert at is not None
    return HostController(
        traddr=at.traddr,
        trsvcid=at.trsvcid,
        subsystem_nqn=at.subsystem_nqn,
        host_nqn=host_nqn,
        credentials=Credentials(secret=HostSecret.parse(at.dhchap_secret)),
        events=events,
    )


async def detach_kept(client: Client, name: str) -> None:
    """Detach a volume that an earlier process of this gateway may have left attached.

    While the gateway reattaches the volume it refuses other changes, so they are retried.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await client.volumes.detach(name)
            except UsageError as error:
                if error.reason == "volume.busy.state":
                    await asyncio.sleep(0.05)
                    continue
                if error.reason != "volume.detached.state":
                    raise
            return
