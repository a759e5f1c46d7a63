"""The verifier service: single-use challenges, limits, uniform refusals, audit records."""

import asyncio
import contextlib
import datetime as dt
import time
from pathlib import Path
from typing import Any, cast

import pytest

from sealane.crypto.attestation.ear import verify_result
from sealane.crypto.certificates import verify_leaf, verify_verifier
from sealane.crypto.evidence.claims import HardwareClock
from sealane.crypto.evidence.cmw import EVIDENCE_BYTES_MAX
from sealane.daemon.broker import verifier as module
from sealane.daemon.broker.peers import (
    BURST_CALLS,
    CALLS_PER_SECOND,
    PREFIXES_MAX,
    RateLimiter,
    address_of,
    prefix_of,
)
from sealane.daemon.broker.verifier import (
    EVIDENCE_TYPES_MAX,
    INTRODUCTION_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    REFUSED,
    Clocks,
)
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from trust.verifiers import FORBIDDEN, LISTED, UNKNOWN, NoBooks, Node, running_verifier


async def refused(awaitable: Any) -> Error:
    with pytest.raises(Error) as caught:
        await awaitable
    return caught.value


async def test_accepted_node_gets_certificate_and_result_for_its_key(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, audit, registry):
        node = Node()
        issued = await node.enrol(service)
    now = dt.datetime.now(dt.UTC)
    anchor = registry.authority.certificate
    assert issued.certificate.public_key() == node.tls.public_key()
    subject = verify_leaf(issued.certificate, anchor=anchor, now=now)
    key = verify_verifier(issued.verifier_certificate, anchor=anchor, now=now)
    result = verify_result(issued.token, verifier_key=key)
    result.check(leaf=issued.certificate, subject=subject.spiffe_id, now=now)
    assert result.policy_version == 1
    (record,) = audit.records
    assert (record["kind"], record["outcome"]) == ("attestation.attest", "granted")
    assert record["subject"] == "spiffe://sealane/gateway/g1"


async def test_evidence_is_taken_once(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, _, _):
        node = Node()
        challenge = await node.challenge(service)
        answer = node.answer(challenge)
        await node.present(service, challenge, *answer)
        error = await refused(node.present(service, challenge, *answer))
        assert error.reason == "attestation.nonce.stale"


async def test_of_two_at_once_one_wins(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, _, _):
        node = Node()
        for _ in range(5):
            challenge = await node.challenge(service)
            answer = node.answer(challenge)
            results = await asyncio.gather(
                *(node.present(service, challenge, *answer) for _ in range(4)),
                return_exceptions=True,
            )
            lost = [r for r in results if isinstance(r, VerificationError)]
            assert len(lost) == 3
            assert {r.reason for r in lost} == {"attestation.nonce.stale"}


async def test_evidence_of_another_session_is_refused(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, audit, _):
        node = Node()
        first, second = await node.challenge(service), await node.challenge(service)
        error = await refused(node.present(service, second, *node.answer(first)))
        assert error.reason == REFUSED
        assert audit.records[-1]["reason"] == "attestation.nonce.mismatch"
        assert audit.records[-1]["refusal"] == "broken_evidence"


async def test_challenge_of_another_verifier_or_start_is_stale(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with (
        running_verifier(tmp_path / "a") as (one, _, _),
        running_verifier(tmp_path / "b") as (other, _, _),
    ):
        node = Node()
        challenge = await node.challenge(one)
        error = await refused(node.present(other, challenge, *node.answer(challenge)))
        assert error.reason == "attestation.nonce.stale"


async def test_challenges_expire_by_a_clock_that_nobody_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_verifier(tmp_path) as (service, _, _):
        node = Node()
        challenge = await node.challenge(service)
        # The wall clock jumps back an hour: the challenge's lifetime doesn't change.
        earlier = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
        monkeypatch.setattr(module, "utc_now", lambda: earlier)
        issued = await node.present(service, challenge, *node.answer(challenge))
        assert issued.certificate.not_valid_after_utc <= earlier + dt.timedelta(minutes=10)
        challenge = await node.challenge(service)
        late = time.monotonic_ns() + 60 * 10**9
        monkeypatch.setattr(module, "monotonic_ns", lambda: late)
        error = await refused(node.present(service, challenge, *node.answer(challenge)))
        assert error.reason == "attestation.nonce.stale"


async def test_unknown_and_forbidden_hear_the_same(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, audit, _):
        heard, seconds = [], []
        for key in (UNKNOWN, FORBIDDEN):
            node = Node(key=key)
            challenge = await node.challenge(service)
            answer = node.answer(challenge)
            started = time.monotonic()
            heard.append(str(await refused(node.present(service, challenge, *answer))))
            seconds.append(time.monotonic() - started)
        assert heard[0] == heard[1]
        assert "attestation.refused" in heard[0]
        assert all(s >= module._REFUSAL_STEP_SECONDS for s in seconds)
        assert [r["reason"] for r in audit.records] == [
            "attestation.hardware.not_listed",
            "attestation.node.refused",
        ]
        assert {r["refusal"] for r in audit.records} == {"policy_violation"}
        assert {r["outcome"] for r in audit.records} == {"refused"}


async def test_what_the_policy_refuses_of_genuine_evidence_is_entered_in_the_books(
    tmp_path: Path,
) -> None:
    async with running_verifier(tmp_path) as (service, _, _):
        books = cast("NoBooks", service._books)
        node = Node(key=FORBIDDEN)
        challenge = await node.challenge(service)
        data, evidence = node.answer(challenge)
        await refused(node.present(service, challenge, data, evidence[:-1] + b"x"))
        assert not books.refusals, "what isn't genuine says nothing of a node"
        challenge = await node.challenge(service)
        await refused(node.present(service, challenge, *node.answer(challenge)))
        (entered,) = books.refusals
        assert (entered["node"], entered["role"]) == (challenge.node, challenge.role)
        assert entered["policy_version"] == service.verifier.policy.version


async def test_broken_evidence_hears_the_same_and_is_told_apart_in_the_audit(
    tmp_path: Path,
) -> None:
    async with running_verifier(tmp_path) as (service, audit, _):
        node = Node()
        challenge = await node.challenge(service)
        data, evidence = node.answer(challenge)
        spoiled = evidence[:-1] + bytes([evidence[-1] ^ 1])
        error = await refused(node.present(service, challenge, data, spoiled))
        assert error.reason == REFUSED
        assert audit.records[-1]["reason"] == "attestation.software.signature"
        assert audit.records[-1]["refusal"] == "broken_evidence"


async def test_type_that_the_policy_does_not_take_is_refused_and_recorded(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, audit, _):
        for types in (["snp"], ["sample"], [], ["x" * NAME_CHARACTERS_MAX]):
            error = await refused(
                service.challenge(
                    node="g1",
                    role="gateway",
                    evidence_types=types,
                    introduction=b"",
                    address="192.0.2.1",
                )
            )
            assert error.reason == REFUSED
            assert audit.records[-1]["reason"] == "attestation.type.refused"


async def test_nothing_is_granted_without_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_verifier(tmp_path) as (service, audit, _):

        async def fail(kind: str, **_: object) -> None:
            raise UnavailableError("audit.unwritable", kind)

        monkeypatch.setattr(audit, "record", fail)
        assert (await refused(Node().enrol(service))).reason == "audit.unwritable"


async def test_oversized_evidence_costs_nothing(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, _, _):
        node = Node()
        challenge = await node.challenge(service)
        data, evidence = node.answer(challenge)
        large = bytes(EVIDENCE_BYTES_MAX + 1)
        error = await refused(node.present(service, challenge, data, large))
        assert isinstance(error, UsageError)
        assert error.reason == "attestation.evidence.size"
        # It wasn't examined: the challenge is still open.
        assert await node.present(service, challenge, data, evidence)


async def test_verifications_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERIFICATIONS_WAITING_MAX", 3)
    async with running_verifier(tmp_path) as (service, _, _):
        results = await asyncio.gather(
            *(Node().challenge(service) for _ in range(20)), return_exceptions=True
        )
        busy = [r for r in results if isinstance(r, UnavailableError)]
        assert len(busy) == 17
        assert {r.reason for r in busy} == {"attestation.busy"}
        assert await Node().challenge(service)


async def test_one_prefix_is_slowed_down_and_others_are_not(tmp_path: Path) -> None:
    limiter = RateLimiter()
    for number in range(BURST_CALLS):
        limiter.take(f"198.51.100.{number % 256}", now_ns=0)
    with pytest.raises(UnavailableError) as caught:
        limiter.take("198.51.100.7", now_ns=0)
    assert caught.value.reason == "attestation.rate.limit"
    limiter.take("198.51.101.7", now_ns=0)
    limiter.take("198.51.100.7", now_ns=10**9 // CALLS_PER_SECOND)
    with pytest.raises(UnavailableError):
        limiter.take("198.51.100.8", now_ns=10**9 // CALLS_PER_SECOND)
    async with running_verifier(tmp_path) as (service, _, _):
        service._limiter = limiter
        limiter._full_at["192.0.2.0/24"] = 1 << 62
        assert (await refused(Node().challenge(service))).reason == "attestation.rate.limit"
        attest = service.attest(session_id=b"", runtime_data=b"", evidence=b"", address="192.0.2.1")
        assert (await refused(attest)).reason == "attestation.rate.limit"
        assert await Node(address="203.0.113.2").enrol(service)


def test_limit_is_not_forgotten_by_calls_from_elsewhere() -> None:
    limiter, now_ns = RateLimiter(), 10**12
    for _ in range(BURST_CALLS):
        limiter.take("198.51.100.7", now_ns=now_ns)
    for number in range(2 * PREFIXES_MAX):
        with contextlib.suppress(UnavailableError):
            limiter.take(f"2001:db8:{number >> 8:x}:{number & 255:x}00::1", now_ns=now_ns)
    with pytest.raises(UnavailableError):
        limiter.take("198.51.100.7", now_ns=now_ns)
    # Callers that don't fit the table share one limit; refilled buckets make room.
    with pytest.raises(UnavailableError):
        limiter.take("203.0.113.1", now_ns=now_ns)
    assert len(limiter._full_at) <= PREFIXES_MAX + 1
    limiter.take("203.0.113.1", now_ns=now_ns + 10**9)
    assert len(limiter._full_at) < PREFIXES_MAX


@pytest.mark.parametrize(
    ("peer", "address", "prefix"),
    [
        ("ipv4:192.0.2.1:5000", "192.0.2.1", "192.0.2.0/24"),
        ("ipv6:%5B2001:db8:0:ff::1%5D:5000", "2001:db8:0:ff::1", "2001:db8::/56"),
        ("ipv6:[2001:db8::ffff]:5000", "2001:db8::ffff", "2001:db8::/56"),
        ("ipv6:[::ffff:192.0.2.9]:5000", "192.0.2.9", "192.0.2.0/24"),
        ("unix:", "unix", "unix"),
        ("", "", ""),
        ("ipv4:nonsense", "ipv4", "ipv4"),
    ],
)
def test_address_and_the_prefix_that_it_is_counted_under(
    peer: str, address: str, prefix: str
) -> None:
    assert address_of(peer) == address
    assert prefix_of(address) == prefix


@pytest.mark.parametrize(
    "request_",
    [
        {"evidence_types": ["x" * 500] * 64},
        {"evidence_types": ["software"] * (EVIDENCE_TYPES_MAX + 1)},
        {"evidence_types": ["x" * (NAME_CHARACTERS_MAX + 1)]},
        {"node": "x" * (NAME_CHARACTERS_MAX + 1)},
        {"role": "x" * (NAME_CHARACTERS_MAX + 1)},
        {"introduction": bytes(INTRODUCTION_BYTES_MAX + 1)},
        {"node": "no name"},
    ],
)
async def test_challenge_that_is_refused_for_its_form_is_recorded(
    tmp_path: Path, request_: dict[str, Any]
) -> None:
    async with running_verifier(tmp_path) as (service, audit, _):
        asked = {
            "node": "g",
            "role": "gateway",
            "evidence_types": ["software"],
            "introduction": b"",
        }
        with pytest.raises(UsageError) as caught:
            await service.challenge(**(asked | request_), address="192.0.2.1")
        (record,) = audit.records
        assert record["reason"] == caught.value.reason
        assert (record["outcome"], record["address"]) == ("refused", "192.0.2.1")


async def test_hardware_whose_clock_went_back_is_refused(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (_, _, registry):
        clocks = Clocks(registry)
        await clocks.advance("ek", HardwareClock(reset_count=2, restart_count=0, millis=10**6))
        await clocks.advance("ek", HardwareClock(reset_count=3, restart_count=0, millis=0))
        error = await refused(
            Clocks(registry).advance("ek", HardwareClock(reset_count=2, restart_count=9, millis=0))
        )
        assert error.reason == "attestation.clock.went_back"
        await clocks.advance("another", HardwareClock(reset_count=0, restart_count=0, millis=0))


async def test_records_hold_no_key(tmp_path: Path) -> None:
    async with running_verifier(tmp_path) as (service, audit, _):
        node = Node()
        issued = await node.enrol(service)
        await refused(Node(key=UNKNOWN).enrol(service))
    text = str(audit.records)
    for pem in (LISTED.pem(), UNKNOWN.pem()):
        body = pem.decode().splitlines()[1]
        assert body not in text
        assert body not in repr((LISTED, service.verifier, issued))
    assert issued.token not in text
