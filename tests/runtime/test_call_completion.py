"""Calls whose callers leave: what changes something is carried out, the rest ends."""

import asyncio
import contextlib
import importlib
import pkgutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2

from patience import PATIENCE_SECONDS
from sealane.daemon.runtime import call_completion, servers
from sealane.daemon.runtime.call_completion import COMPLETED
from sealane.daemon.runtime.local_calls import LocalAuthorizer
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.origins import Origins
from sealane.daemon.runtime.servers import new_server, new_shared_server, running
from sealane.protocol import v1
from sealane.protocol.v1 import devices_pb2, devices_pb2_grpc

ENDS_WITH_ITS_CALLER = {
    # Reads.
    "Broker/GetVolumeDescriptor",
    "Broker/ListVolumeDescriptors",
    "DeviceRegistry/GetDevice",
    "DeviceRegistry/ListDevices",
    "Membership/ListNodes",
    "Nodes/GetNode",
    "Offload/GetAccelerator",
    "Offload/ListAccelerators",
    "Operator/GetAuthorities",
    "Operator/GetEncryptionKeys",
    "Operator/GetTenantKey",
    "Operator/ListLeases",
    "Operator/ListRegisteredVolumes",
    "Operator/ListTenantKeys",
    "Policies/GetPolicy",
    "Policies/GetPolicyOwners",
    "Sessions/GetFabric",
    "Sessions/GetSession",
    "Sessions/ListSessions",
    "Storage/BatchGetNamespaces",
    "Storage/GetNamespace",
    "Storage/GetTarget",
    "Subsystems/GetSubsystem",
    "Subsystems/ListSubsystems",
    "Trust/GetPeer",
    "Volumes/GetVolume",
    "Volumes/ListVolumes",
    # Of use to the caller only, or carried out in tasks of their own.
    "Offload/ProbeAccelerator",
    "Attestation/Attest",
    "Attestation/GetChallenge",
    "Broker/GetVolumeKey",
    "Broker/GrantLease",
    "CallKeys/GetCallKey",
    "SessionPeer/Establish",
    "Sessions/CloseSession",
    "Nodes/DrainNode",
    "Nodes/UndrainNode",
    "Sessions/DrainFabric",
    "Sessions/ListenSession",
    "Sessions/OpenSession",
    "Storage/OpenQueue",
    "Trust/AuthorizePeers",
}


class Registry(devices_pb2_grpc.DeviceRegistryServicer):
    """Changes and reads that wait until they may go on."""

    def __init__(self) -> None:
        self.begun = 0
        self.changed = 0
        self.has_begun, self.has_ended, self.may_go_on = (asyncio.Event() for _ in range(3))

    async def _wait(self) -> None:
        self.begun += 1
        self.has_begun.set()
        try:
            await self.may_go_on.wait()
        finally:
            self.has_ended.set()

    async def ForgetDevice(  # noqa: N802 - gRPC's name
        self, _request: devices_pb2.ForgetDeviceRequest, _context: object
    ) -> empty_pb2.Empty:
        await self._wait()
        self.changed += 1
        return empty_pb2.Empty()

    async def GetDevice(  # noqa: N802 - gRPC's name
        self, _request: devices_pb2.GetDeviceRequest, _context: object
    ) -> devices_pb2.DeviceDetails:
        await self._wait()
        return devices_pb2.DeviceDetails()


class Everyone(LocalAuthorizer):
    """Refuses nothing."""

    async def authorize(self, *_: object) -> None:
        pass


@contextlib.asynccontextmanager
async def _served(
    tmp_path: Path, registry: Registry, *, is_shared: bool = False
) -> AsyncIterator[devices_pb2_grpc.DeviceRegistryStub]:
    address = f"unix:{tmp_path}/s"
    server = new_server(Metrics(), None)
    if is_shared:
        server = new_shared_server(Metrics(), Everyone(Origins()))
    devices_pb2_grpc.add_DeviceRegistryServicer_to_server(registry, server)
    server.add_insecure_port(address)
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        running(server),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield devices_pb2_grpc.DeviceRegistryStub(channel)


async def _leave(registry: Registry, call: Any) -> None:
    """Cancel a call that the servicer has begun."""
    await registry.has_begun.wait()
    call.cancel()


async def test_a_change_is_carried_out_although_its_caller_left(tmp_path: Path) -> None:
    registry = Registry()
    async with _served(tmp_path, registry) as stub:
        await _leave(registry, stub.ForgetDevice(devices_pb2.ForgetDeviceRequest()))
        # A second call shows that the server knows of the end of the first.
        registry.has_begun.clear()
        second = stub.ForgetDevice(devices_pb2.ForgetDeviceRequest())
        await registry.has_begun.wait()
        assert not registry.has_ended.is_set()
        registry.may_go_on.set()
        await second
    assert registry.changed == 2


async def test_a_read_ends_with_its_caller(tmp_path: Path) -> None:
    registry = Registry()
    async with _served(tmp_path, registry) as stub:
        await _leave(registry, stub.GetDevice(devices_pb2.GetDeviceRequest()))
        await registry.has_ended.wait()


async def test_callers_that_leave_make_no_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_completion, "RUNNING_MAX", 2)
    registry = Registry()
    async with _served(tmp_path, registry) as stub:
        calls = 0
        while registry.begun < 2 or calls < 10:
            call = stub.ForgetDevice(devices_pb2.ForgetDeviceRequest(), timeout=0.05)
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            calls += 1
        assert registry.begun == 2
        registry.may_go_on.set()
        await stub.ForgetDevice(devices_pb2.ForgetDeviceRequest())
    assert registry.changed == registry.begun >= 3


@pytest.mark.parametrize("is_shared", [False, True])
async def test_server_that_stops_waits_for_what_callers_have_left_behind(
    tmp_path: Path, is_shared: bool
) -> None:
    registry = Registry()
    async with _served(tmp_path, registry, is_shared=is_shared) as stub:
        await _leave(registry, stub.ForgetDevice(devices_pb2.ForgetDeviceRequest()))
        asyncio.get_running_loop().call_later(0.1, registry.may_go_on.set)
    assert registry.changed == 1


async def test_what_is_left_then_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "DRAIN_SECONDS", 0.1)
    registry = Registry()
    async with _served(tmp_path, registry) as stub:
        await _leave(registry, stub.ForgetDevice(devices_pb2.ForgetDeviceRequest()))
    assert registry.has_ended.is_set()
    assert registry.changed == 0


async def test_error_that_nobody_hears_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Registry):
        async def _wait(self) -> None:
            await super()._wait()
            raise RuntimeError("a fault of the servicer")

    registry = Broken()
    async with _served(tmp_path, registry) as stub:
        call = stub.ForgetDevice(devices_pb2.ForgetDeviceRequest(), timeout=0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        registry.may_go_on.set()
        await registry.has_ended.wait()
        await asyncio.sleep(0.01)
    assert "a fault of the servicer" in capsys.readouterr().out


def test_each_method_is_either_completed_or_ends_with_its_caller() -> None:
    names = [module.name for module in pkgutil.iter_modules(v1.__path__)]
    modules = [importlib.import_module(f"{v1.__name__}.{n}") for n in names if n.endswith("_pb2")]
    found = {
        f"{service.name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.server_streaming
    }
    completed = {name.removeprefix("/sealane.v1.") for name in COMPLETED}
    assert not completed & ENDS_WITH_ITS_CALLER
    assert found == completed | ENDS_WITH_ITS_CALLER
