"""A target's device: opening, loss, reopening, and its reports to the broker."""

import asyncio
import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from sealane.crypto.exchange import wipe
from sealane.daemon.config import TargetConfig
from sealane.daemon.device.anchored_catalogue import AnchoredCatalogue
from sealane.daemon.device.anchors.anchor import Anchor
from sealane.daemon.device.anchors.authentic import AuthenticAnchor
from sealane.daemon.device.anchors.broker import BrokerAnchor, NoAnchor
from sealane.daemon.device.anchors.file_anchor import FileAnchor
from sealane.daemon.device.broker_calls import DeviceClient, OpenedDevice
from sealane.daemon.device.catalogue import Catalogue, make_directory
from sealane.daemon.device.directory import Device, DeviceFile
from sealane.daemon.device.openings import FENCED, GIVEN_AWAY, LOST, MOVED
from sealane.daemon.node.authorizations import NONCE_BYTES, Ask, Authorizations
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.node.tpm_connection import open_tpm
from sealane.daemon.node.trust_client import TrustClient
from sealane.daemon.runtime.directories import prepare_directory
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.target.control import StorageService
from sealane.daemon.volume.jobs import Job
from sealane.daemon.volume.take_overs import TakeOver
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.kinds import AnchorKind

ANCHORS_NAME: Final = "anchors"
GIVEN_BACK_SECONDS: Final = 2.0
"""Interval at which a target that lost a device by a move asks whether it owns it again."""
_RETRY_SECONDS: Final = 0.5

Reopen = Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def opened_device(
    config: TargetConfig,
    *,
    directory: Path,
    state: Path,
    client: DeviceClient,
    timeout_seconds: float,
    tcti: str,
) -> AsyncIterator[tuple[Device, AnchoredCatalogue, Reopen]]:
    """Open the device in `directory`, and check its catalogue against its anchor.

    The last item yielded reopens the device after it was lost and closed. Waits up to
    `timeout_seconds` for a broker, and for a former owner to stop. Errors of `DeviceClient.open`,
    those of the kind of anchor (anchors.md), and `device.anchor.mismatch`.
    """
    async with contextlib.AsyncExitStack() as stack:
        device, catalogue, is_initial = await _open(
            config,
            directory=directory,
            state=state,
            client=client,
            timeout_seconds=timeout_seconds,
            tcti=tcti,
            stack=stack,
        )

        async def take_up(*, is_initial: bool) -> None:
            is_believed = is_initial or config.anchor == AnchorKind.NONE
            await catalogue.adopt(device.anchors, is_believed=is_believed)
            if is_initial:
                await client.confirm(device.served)
            get_logger().info(
                "device_opened",
                device_id=str(device.device_id),
                fencing_epoch=device.served.fencing_epoch,
                anchor=config.anchor,
                is_initial=is_initial,
            )

        async def reopen() -> None:
            await asyncio.to_thread(device.file.hold_again)
            async with contextlib.AsyncExitStack() as half:
                half.callback(device.file.release)
                found = await catalogue.states() if config.anchor == AnchorKind.BROKER else []
                opened = await client.open(device.device_id, anchor=config.anchor, found=found)
                half.callback(wipe, opened.secret)
                anchor = await _anchor(
                    opened, config, state=state, client=client, stack=stack, tcti=tcti
                )
                half.push_async_callback(anchor.close)
                device.reopen(
                    opened.served,
                    secret=opened.secret,
                    anchor=anchor,
                    is_believed=opened.is_initial,
                )
                half.pop_all()
            try:
                await take_up(is_initial=opened.is_initial)
            except BaseException:
                await device.close()
                raise

        await take_up(is_initial=is_initial)
        yield device, catalogue, reopen


def authorize_at(trust: TrustClient, device: Device) -> Ask:
    """Return a function that asks the broker about peers; it may find that `device` is lost."""

    async def ask(nonce: bytes, peers: Sequence[PeerIncarnation]) -> Sequence[str]:
        if device.loss is not None:
            return [device.loss.reason] * len(peers)
        try:
            return await trust.authorize(nonce, peers, device=device.served)
        except VerificationError as error:
            if error.reason in LOST:
                device.lose(error)
            raise

    return ask


async def keep_served(
    device: Device,
    reopen: Reopen,
    *,
    client: DeviceClient,
    trust: TrustClient,
    authorizations: Authorizations,
    service: StorageService,
    report: Callable[[bool], Awaitable[None]],
) -> None:
    """Each time the device is lost: fence its gateways, close its volumes, and tell the broker.

    `report` gets whether the device is served. A device that an operator moved away is reopened
    when it is moved back. After an UnavailableError it is raised: a new process may open the device
    again. After any other loss it stays closed, so that two processes don't keep taking a device
    from each other.
    """
    await report(True)
    while True:
        loss = await device.wait_lost()
        get_logger().error("device_lost", reason=loss.reason, message=str(loss.args[0]))
        await report(False)
        authorizations.lose_all(loss.reason)
        await service.abandon(loss)
        await device.close()
        await _tell_closed(client, device)
        if isinstance(loss, UnavailableError):
            raise loss
        if loss.reason not in GIVEN_AWAY or not await _is_back(device, trust, reopen):
            return
        await service.resume()
        await report(True)


@dataclass(frozen=True, slots=True)
class DeviceRecorder:
    """Reports as the device's opening at the time of the call."""

    client: DeviceClient
    device: Device

    async def findings(self, volume_id: uuid.UUID, job: Job) -> None:
        """Have the broker record what a job found."""
        await self.client.report_findings(self.device.served, volume_id, job)

    async def take_over(self, volume_id: uuid.UUID, take_over: TakeOver) -> None:
        """Have the broker record that a gateway took over."""
        await self.client.report_take_over(self.device.served, volume_id, take_over)


async def _is_back(device: Device, trust: TrustClient, reopen: Reopen) -> bool:
    """Wait until this target owns the device again and has reopened it; False if it never can."""
    reported = ""
    while True:
        await asyncio.sleep(GIVEN_BACK_SECONDS)
        try:
            await _check_ours(device, trust)
            await reopen()
        except Error as error:
            if error.reason in GIVEN_AWAY:
                continue
            if isinstance(error, VerificationError) and error.reason.startswith("device."):
                get_logger().error(
                    "device_not_opened", reason=error.reason, message=str(error.args[0])
                )
                return False
            # A broker that is away, a certificate being renewed, an owner that hasn't closed it.
            if error.reason != reported:
                reported = error.reason
                get_logger().warning(
                    "device_not_open_yet", reason=error.reason, message=str(error.args[0])
                )
        else:
            return True


async def _check_ours(device: Device, trust: TrustClient) -> None:
    """Raise VerificationError `device.owner.refused`, `device.forgotten` if it isn't ours.

    Doesn't hold the directory, which the present owner may be about to open.
    """
    try:
        await trust.authorize(secrets.token_bytes(NONCE_BYTES), [], device=device.served)
    except VerificationError as error:
        # These only say that our former opening is over, whoever owns the device.
        if error.reason not in {FENCED, MOVED}:
            raise


async def _tell_closed(client: DeviceClient, device: Device) -> None:
    """Tell the broker that the device is closed here, so that a new owner needn't wait."""
    try:
        await client.close(device.served)
    except Error as error:
        get_logger().warning("device_close_untold", reason=error.reason, message=str(error.args[0]))


async def _open(
    config: TargetConfig,
    *,
    directory: Path,
    state: Path,
    client: DeviceClient,
    timeout_seconds: float,
    tcti: str,
    stack: contextlib.AsyncExitStack,
) -> tuple[Device, AnchoredCatalogue, bool]:
    """Open the device, which `stack` closes; the last item is True if it had no anchor yet."""
    make_directory(directory)
    async with contextlib.AsyncExitStack() as half:
        file = await asyncio.to_thread(DeviceFile, directory)
        half.callback(file.release)
        catalogue = AnchoredCatalogue(Catalogue(directory), file=file)
        found = await catalogue.states() if config.anchor == AnchorKind.BROKER else []
        opened = await _opened(
            client, file.device_id, config, found, timeout_seconds=timeout_seconds
        )
        half.callback(wipe, opened.secret)
        anchor = await _anchor(opened, config, state=state, client=client, stack=stack, tcti=tcti)
        half.push_async_callback(anchor.close)
        device = Device(
            opened.served,
            file=file,
            secret=opened.secret,
            anchor=anchor,
            anchor_seconds=config.anchor_seconds if config.anchor == AnchorKind.TPM2 else 0,
            is_believed=opened.is_initial,
        )
        half.pop_all()
    stack.push_async_callback(_tell_closed, client, device)
    stack.push_async_callback(device.close)
    return device, catalogue, opened.is_initial


async def _opened(
    client: DeviceClient,
    device_id: uuid.UUID,
    config: TargetConfig,
    found: Sequence[bytes],
    *,
    timeout_seconds: float,
) -> OpenedDevice:
    """Open the device at a broker; retry until the time is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_seconds
    while True:
        try:
            return await client.open(device_id, anchor=config.anchor, found=found)
        except UnavailableError as error:
            if loop.time() >= deadline:
                raise
            get_logger().warning(
                "device_not_open_yet", reason=error.reason, message=str(error.args[0])
            )
        await asyncio.sleep(_RETRY_SECONDS)


async def _anchor(
    opened: OpenedDevice,
    config: TargetConfig,
    *,
    state: Path,
    client: DeviceClient,
    stack: contextlib.AsyncExitStack,
    tcti: str,
) -> Anchor:
    """Open the configured anchor, whose records are authenticated under the device's secret."""
    anchor = await _kept(opened, config, state=state, client=client, stack=stack, tcti=tcti)
    if config.anchor == AnchorKind.NONE:
        return anchor
    try:
        return AuthenticAnchor(
            anchor, device_id=opened.served.device_id, kind=config.anchor, secret=opened.secret
        )
    except BaseException:
        await anchor.close()
        raise


async def _kept(
    opened: OpenedDevice,
    config: TargetConfig,
    *,
    state: Path,
    client: DeviceClient,
    stack: contextlib.AsyncExitStack,
    tcti: str,
) -> Anchor:
    """Open the configured anchor's storage; create it for a new device."""
    if config.anchor == AnchorKind.BROKER:
        return BrokerAnchor(
            opened.records, floor=opened.floor, advance=partial(client.advance, opened.served)
        )
    if config.anchor == AnchorKind.NONE:
        get_logger().warning(
            "development_device",
            message="no anchor: anybody who can restore an old copy of the target's directory can "
            "roll back its volumes; for development only",
        )
        return NoAnchor()
    directory = state / ANCHORS_NAME
    prepare_directory(directory, key="node.state_dir")
    device_id = opened.served.device_id
    path = directory / str(device_id)
    if opened.is_initial:
        path.unlink(missing_ok=True)
    if config.anchor == AnchorKind.FILE:
        make = FileAnchor.initialise if opened.is_initial else FileAnchor.open
        return await asyncio.to_thread(make, path, device_id=device_id)
    tpm = await asyncio.to_thread(open_tpm, tcti)
    stack.callback(tpm.close)
    from sealane.daemon.device.anchors.tpm_anchor import TpmAnchor  # noqa: PLC0415 - an extra

    make_tpm = TpmAnchor.initialise if opened.is_initial else TpmAnchor.open
    return await asyncio.to_thread(
        make_tpm, tpm, path, device_id=device_id, index=config.anchor_index
    )
