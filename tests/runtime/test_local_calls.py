"""Which calls on the Unix sockets are whose: every method has a row, and every row is obeyed."""

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import sealane.protocol.v1
from patience import PATIENCE_SECONDS
from sealane.daemon.runtime import calls
from sealane.daemon.runtime.access import Parties
from sealane.daemon.runtime.authorizers import ALLOWED_ROLES
from sealane.daemon.runtime.calls import CallInterceptor
from sealane.daemon.runtime.local_calls import (
    ALLOWED_PARTIES,
    CALL_CLASSES,
    CallClass,
    LocalAuthorizer,
)
from sealane.daemon.runtime.metrics import Metrics
from sealane.daemon.runtime.origins import Origin, Origins
from sealane.daemon.runtime.parties import Party
from sealane.errors import VerificationError

PEER = "unix-abstract:sealane-test"


def methods() -> Iterator[str]:
    """Yield every method of every service that a daemon may serve."""
    names = [each.name for each in pkgutil.iter_modules(sealane.protocol.v1.__path__)]
    own = [
        importlib.import_module(f"sealane.protocol.v1.{name}")
        for name in names
        if name.endswith("_pb2")
    ]
    for module in (*own, health_pb2, reflection_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


def test_every_method_has_one_row_and_no_row_is_for_nothing() -> None:
    assert sorted(CALL_CLASSES) == sorted(methods())
    assert {*ALLOWED_PARTIES} == {*CallClass}


def test_what_nodes_call_over_tls_is_what_nobody_calls_here() -> None:
    peers = {method for method, which in CALL_CLASSES.items() if which is CallClass.PEERS}
    attestation = {"/sealane.v1.Attestation/GetChallenge", "/sealane.v1.Attestation/Attest"}
    assert peers == {*ALLOWED_ROLES} | attestation


def test_what_readers_may_call_is_named_as_what_only_reads() -> None:
    reading = ("Get", "List", "Watch", "Check", "ExportAudit", "ServerReflectionInfo")
    for method, which in CALL_CLASSES.items():
        if Party.READER in ALLOWED_PARTIES[which]:
            assert method.rpartition("/")[2].startswith(reading), method


class OneOrigin(Origins):
    """A connection of user 7, whose parties a test sets."""

    def __init__(self, *parties: Party) -> None:
        super().__init__()
        self.parties: Parties = frozenset(parties)

    def of(self, context: Any) -> Origin:  # noqa: ARG002
        return Origin(user=7, parties=lambda: self.parties)


async def reason_of(origins: Origins, method: str) -> str:
    try:
        await LocalAuthorizer(origins).authorize(method, None, b"")
    except VerificationError as error:
        return str(error.reason)
    return "served"


async def test_each_class_is_served_to_its_parties_only() -> None:
    one_of = {which: method for method, which in CALL_CLASSES.items()}
    served = {
        party: {
            which
            for which, method in one_of.items()
            if await reason_of(OneOrigin(party), method) == "served"
        }
        for party in Party
    }
    assert served == {
        Party.OPERATOR: {CallClass.OPERATE, CallClass.READ, CallClass.USE, CallClass.OWN},
        Party.JOB: {CallClass.USE, CallClass.OWN},
        Party.READER: {CallClass.READ, CallClass.OWN},
    }
    everything = OneOrigin(*Party)
    with pytest.raises(VerificationError, match="in no list of its calls") as refused:
        await LocalAuthorizer(everything).authorize("/sealane.v1.Volumes/Unheard", None, b"")
    assert refused.value.reason == "call.operator.refused"
    assert await reason_of(OneOrigin(), one_of[CallClass.OWN]) == "call.party.refused"
    assert await reason_of(OneOrigin(Party.READER), one_of[CallClass.OPERATE]) == (
        "call.operator.refused"
    )


class AbortedError(Exception):
    """The end of a call, with its reason id."""


def context() -> Any:
    async def abort(_code: Any, _text: str, trailing_metadata: Any) -> None:
        raise AbortedError(dict(trailing_metadata)["sealane-reason"])

    return SimpleNamespace(abort=abort, peer=lambda: PEER)


async def endless(*_: Any) -> AsyncIterator[bytes]:
    while True:
        yield b""
        await asyncio.sleep(0.01)


async def silent(*_: Any) -> None:
    await asyncio.Event().wait()


HANDLERS = {
    "stream": ("/sealane.v1.Volumes/WatchVolume", grpc.unary_stream_rpc_method_handler(endless)),
    "writer": ("/grpc.health.v1.Health/Watch", grpc.unary_stream_rpc_method_handler(silent)),
    "dialogue": (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        grpc.stream_stream_rpc_method_handler(endless),
    ),
}


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("keeps", [True, False])
async def test_a_stream_ends_when_a_reload_has_taken_the_right_away(
    kind: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "STREAM_CHECK_SECONDS", 0.02)
    method, handler = HANDLERS[kind]
    origins = OneOrigin(Party.READER)

    async def find(_details: Any) -> Any:
        return handler

    details: Any = SimpleNamespace(method=method, invocation_metadata=())
    interceptor = CallInterceptor(Metrics(), LocalAuthorizer(origins))
    wrapped = await interceptor.intercept_service(find, details)
    behavior = wrapped.stream_stream or wrapped.unary_stream
    request = wrapped.request_deserializer(b"") if kind != "dialogue" else endless()

    async def follow() -> None:
        async for _ in behavior(request, context()):
            pass

    following = asyncio.ensure_future(follow())
    await asyncio.sleep(0.1)
    assert not following.done()
    if keeps:
        following.cancel()
        await asyncio.wait({following})
        return
    origins.parties = frozenset({Party.JOB})
    with pytest.raises(AbortedError, match=r"call\.party\.refused"):
        await asyncio.wait_for(following, PATIENCE_SECONDS)
    origins.parties = frozenset()
    with pytest.raises(AbortedError, match=r"call\.party\.refused"):
        await asyncio.wait_for(follow(), PATIENCE_SECONDS)
