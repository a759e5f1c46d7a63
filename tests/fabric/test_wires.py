"""Which wires carry a session's paths: what both ends have, else UDP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog

from fabrics import fabric, settings
from sealane.daemon.fabric import service
from sealane.daemon.fabric.establishment import Answer, Offer
from sealane.daemon.fabric.paths import bind_addresses, carrying, pair_ends, unit_room
from sealane.errors import Error, UsageError
from session_pairs import RATE, connected, wait_listening

HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}
BOTH = ("udp", "verbs")


def queue_pair(host: str, number: int = 17, mtu: int = 4096) -> str:
    return f"verbs:{host},qpn={number},psn=1,mtu={mtu}"


NEAR, FAR = ("10.0.0.1:1", "10.0.0.1:2"), ("10.0.0.2:3", "10.0.0.2:4", "10.0.0.2:5")
NEAR_PAIR, FAR_PAIR = queue_pair("10.0.0.1"), queue_pair("10.0.0.2", mtu=2048)


@pytest.mark.parametrize(
    ("own", "peers", "expected"),
    [
        (NEAR, FAR, [(NEAR[0], FAR[0]), (NEAR[1], FAR[1])]),
        ((*NEAR, NEAR_PAIR), FAR, [(NEAR[0], FAR[0]), (NEAR[1], FAR[1])]),
        ((NEAR_PAIR, NEAR[0]), (FAR[0], FAR_PAIR), [(NEAR[0], FAR[0]), (NEAR_PAIR, FAR_PAIR)]),
        ((NEAR_PAIR,), (FAR_PAIR, FAR_PAIR), [(NEAR_PAIR, FAR_PAIR)]),
        ((NEAR_PAIR,), FAR, []),
    ],
)
def test_ends_are_paired_by_wire_and_place_the_same_at_both_ends(
    own: tuple[str, ...], peers: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    assert pair_ends(own, peers) == expected
    assert [pair[::-1] for pair in pair_ends(peers, own)] == expected


def test_an_end_is_bound_for_each_wire_address_and_path() -> None:
    assert bind_addresses(["10.0.0.1", "fd00::1"], 2, ("verbs", "udp")) == [
        *("10.0.0.1:0", "[fd00::1]:0") * 2,
        *("verbs:10.0.0.1", "verbs:fd00::1") * 2,
    ]
    assert bind_addresses(["10.0.0.1"], 1, ("verbs",)) == ["verbs:10.0.0.1"]
    assert bind_addresses(["10.0.0.1"], 1, ("verbs",), "write") == ["verbs:10.0.0.1,write"]


def test_the_smallest_queue_pair_limits_the_unit() -> None:
    assert unit_room(NEAR) > 60_000
    assert unit_room((*NEAR, NEAR_PAIR)) == 4037
    assert unit_room((NEAR_PAIR, *NEAR, FAR_PAIR)) == 1989
    assert carrying(1989, (*NEAR, FAR_PAIR)) == [*NEAR, FAR_PAIR]
    assert carrying(1990, (*NEAR, FAR_PAIR)) == [*NEAR]


class WithQueuePairs:
    """A real endpoint on UDP that also names queue pairs, and records what it is started with."""

    mtus: ClassVar[dict[str, int]] = {}
    started: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, bind: list[str], *arguments: Any, **options: Any) -> None:
        self._pairs = [
            queue_pair(host, mtu=self.mtus[host])
            for host in (each.removeprefix("verbs:") for each in bind)
            if host in self.mtus
        ]
        udp = [each for each in bind if not each.startswith("verbs:")]
        self._paths = len(udp)
        self._real = real_endpoint(udp or ["127.0.0.1:0"], *arguments, **options)

    @property
    def local_addresses(self) -> list[str]:
        return [*self._real.local_addresses[: self._paths], *self._pairs]

    def start(self, **arguments: Any) -> None:
        self.started.append(dict(arguments))
        peers = [each for each in arguments["peer_addresses"] if not each.startswith("verbs:")]
        self._real.start(**{**arguments, "peer_addresses": peers})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


real_endpoint = service.SessionEndpoint


@pytest.fixture
def named_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both fabrics name queue pairs with an MTU of 4096."""
    monkeypatch.setattr(WithQueuePairs, "mtus", dict.fromkeys(HOSTS.values(), 4096))
    monkeypatch.setattr(WithQueuePairs, "started", [])
    monkeypatch.setattr(service, "SessionEndpoint", WithQueuePairs)


@contextlib.asynccontextmanager
async def fabrics(
    directory: Path, near: dict[str, Any], far: dict[str, Any], **tampering: Callable[[Any], Any]
) -> AsyncIterator[tuple[Any, Any]]:
    ends = [
        replace(settings(directory, name), **{"listen_data": (HOSTS[name],), **changes})
        for name, changes in (("a", near), ("b", far))
    ]
    async with (
        fabric(ends[0], "fabric-a", **tampering) as left,
        fabric(ends[1], "fabric-b") as right,
    ):
        yield left, right


@pytest.mark.usefixtures("named_pairs")
@pytest.mark.parametrize(
    ("mtus", "ends", "units", "wires"),
    [
        ((4096, 4096), ({"wires": BOTH}, {"wires": BOTH}), (4032, 1408, 1152), BOTH),
        ((4096, 2048), ({"wires": BOTH}, {"wires": BOTH}), (1408, 1152), BOTH),
        ((2048, 4096), ({"wires": BOTH}, {"wires": BOTH}), (1984, 1408, 1152), BOTH),
        # Too small for any unit: over UDP only, and without its limit.
        ((512, 4096), ({"wires": BOTH}, {"wires": BOTH}), (8896, 1408, 1152), ("udp",)),
        ((4096, 512), ({"wires": BOTH}, {"wires": BOTH}), (4032, 1408, 1152), ("udp",)),
        ((4096, 4096), ({"wires": BOTH}, {}), (4032, 1408, 1152), ("udp",)),
        ((4096, 4096), ({}, {"wires": BOTH}), (8896, 1408, 1152), ("udp",)),
    ],
)
async def test_both_ends_start_with_the_same_wires_and_units(  # noqa: PLR0917 - a table
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mtus: tuple[int, int],
    ends: tuple[dict[str, Any], dict[str, Any]],
    units: tuple[int, ...],
    wires: tuple[str, ...],
) -> None:
    monkeypatch.setattr(WithQueuePairs, "mtus", dict(zip(HOSTS.values(), mtus, strict=True)))
    searched = {"unit_bytes": None}

    async with (
        fabrics(tmp_path, ends[0] | searched, ends[1] | searched) as (left, right),
        connected(left, right),
    ):
        pass

    for start in WithQueuePairs.started:
        assert tuple(start["units"]) == units
        addresses = start["peer_addresses"]
        assert tuple("verbs" if "qpn" in each else "udp" for each in addresses) == wires
    assert len(WithQueuePairs.started) == 2


@pytest.mark.usefixtures("named_pairs")
async def test_relays_are_used_over_udp_only(tmp_path: Path) -> None:
    async with (
        fabrics(tmp_path, {"wires": BOTH}, {"wires": BOTH}) as (left, right),
        connected(left, right, via=lambda addresses: addresses[:1]),
    ):
        pass

    peers = [start["peer_addresses"] for start in WithQueuePairs.started]
    assert [len(each) for each in peers] == [1, 1]
    assert not any("qpn" in address for each in peers for address in each)


async def refusals(left: Any, right: Any) -> set[str]:
    with pytest.raises(BaseExceptionGroup) as group:
        async with connected(left, right):
            raise AssertionError
    refused = group.value.subgroup(Error)
    assert refused is not None
    return {error.reason for error in refused.exceptions if isinstance(error, Error)}


async def test_without_a_wire_in_common_there_is_no_session_and_the_listener_waits_on(
    tmp_path: Path,
) -> None:
    reasons: list[str] = []

    def change(offer: Offer) -> Offer:
        return offer if reasons else replace(offer, data_addresses=(NEAR_PAIR,))

    async with (
        fabrics(tmp_path, {}, {}, change_offer=change) as (left, right),
        asyncio.TaskGroup() as tasks,
    ):
        common: dict[str, Any] = {"display_name": "data", "region_bytes": 1 << 20}
        listening = tasks.create_task(right.service.listen(job_token=right.job_token, **common))
        await wait_listening(right)
        to = {
            "job_token": left.job_token,
            "peer_node": right.name,
            "peer_address": right.address,
            "rate_bits_per_second": RATE,
        }
        with pytest.raises(UsageError) as refused:
            await left.service.open(**to, **common)
        reasons.append(refused.value.reason)
        await left.service.open(**to, **common)
        await listening
    assert reasons == ["session.establish.wires"]


@pytest.mark.parametrize(
    "address",
    ["verbs:10.0.0.1", NEAR_PAIR.replace("17", "16777216"), NEAR_PAIR.replace("4096", "9000")],
)
async def test_an_initiator_with_a_queue_pair_that_can_not_be_is_refused(
    tmp_path: Path, address: str
) -> None:
    def change(offer: Offer) -> Offer:
        return replace(offer, data_addresses=(*offer.data_addresses, address))

    async with fabrics(tmp_path, {}, {}, change_offer=change) as (left, right):
        assert await refusals(left, right) == {"session.establish.malformed"}


@pytest.mark.usefixtures("named_pairs")
@pytest.mark.parametrize(
    ("wires", "mtu"), [(("udp",), 4096), (BOTH, 1024)], ids=["not offered", "too small"]
)
async def test_a_responder_with_queue_pairs_that_do_not_fit_is_refused(
    tmp_path: Path, wires: tuple[str, ...], mtu: int
) -> None:
    def change(answer: Answer) -> Answer:
        udp = answer.data_addresses[:1]
        return replace(answer, data_addresses=(*udp, queue_pair(HOSTS["b"], mtu=mtu)))

    ends: dict[str, Any] = {"wires": wires}
    async with fabrics(tmp_path, ends, ends, change_answer=change) as (left, right):
        assert await refusals(left, right) == {"session.establish.malformed"}


async def test_without_a_device_a_session_goes_over_udp_and_the_log_says_why_once(
    tmp_path: Path,
) -> None:
    with structlog.testing.capture_logs() as lines:
        async with fabrics(tmp_path, {"wires": BOTH}, {}) as (left, right):
            for _ in range(2):
                async with connected(left, right) as (near, _far):
                    (path,) = left.service.get(near.session.name).paths()
                    assert path.wire == "udp"
    (line,) = [line for line in lines if line["event"] == "verbs_unavailable"]
    assert "127.0.0.1" in line["reason"] or "libibverbs" in line["reason"]


async def test_a_relay_is_none_of_verbs(tmp_path: Path) -> None:
    async with fabrics(tmp_path, {}, {}) as (left, right):
        with pytest.raises(BaseExceptionGroup) as group:
            async with connected(left, right, via=lambda _: [NEAR_PAIR]):
                raise AssertionError
    assert group.group_contains(Error, match="session.via_address.malformed")


@pytest.mark.usefixtures("named_pairs")
async def test_units_that_no_end_carries_are_refused_here(tmp_path: Path) -> None:
    ends: dict[str, Any] = {"wires": ("verbs",), "unit_bytes": 8896}
    async with fabrics(tmp_path, ends, ends) as (left, right):
        assert await refusals(left, right) == {"session.establish.wires"}


async def test_without_a_device_and_udp_there_is_no_session(tmp_path: Path) -> None:
    async with fabrics(tmp_path, {"wires": ("verbs",)}, {}) as (left, right):
        assert await refusals(left, right) == {"session.endpoint.resources"}
