"""Call proofs: only the caller opens a key, a proof covers one call, a counter is used once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealane.crypto.call_proof import (
    WINDOW,
    CallEnds,
    CallKey,
    CallProver,
    ReplayWindow,
    request_digest,
)
from sealane.crypto.certificates import Subject
from sealane.crypto.kem import X25519KemKey
from sealane.errors import UsageError, VerificationError

KEM = X25519KemKey.create()
SERVER = "spiffe://sealane/broker/b"
CALLER = Subject(
    node="g", role="gateway", tenant="t", incarnation=b"i" * 16, kem_public_key=KEM.public_key
)
ENDS = CallEnds(server=SERVER, caller=CALLER.spiffe_id, incarnation=CALLER.incarnation)
METHOD = "/sealane.v1.Broker/SetVolumeShare"


def reason_of(call: object) -> str:
    assert isinstance(call, pytest.ExceptionInfo)
    assert isinstance(call.value, VerificationError)
    return call.value.reason


def opened(key: CallKey, *, ends: CallEnds = ENDS, kem: X25519KemKey = KEM) -> CallProver:
    return CallProver.open(key.key_id, key.sealed, ends=ends, kem=kem)


@pytest.mark.parametrize(
    "ends",
    [
        replace(ENDS, server="spiffe://sealane/broker/c"),
        replace(ENDS, caller="spiffe://sealane/gateway/h"),
        replace(ENDS, incarnation=b"j" * 16),
    ],
)
def test_a_key_opens_between_its_ends_only(ends: CallEnds) -> None:
    key = CallKey(CALLER, server=SERVER)
    with pytest.raises(VerificationError) as caught:
        opened(key, ends=ends)
    assert reason_of(caught) == "secret.sealed"
    opened(key)


def test_a_key_opens_with_the_kem_key_of_the_certificate_only() -> None:
    key = CallKey(CALLER, server=SERVER)
    with pytest.raises(VerificationError) as caught:
        opened(key, kem=X25519KemKey.create())
    assert reason_of(caught) == "secret.sealed"
    with pytest.raises(VerificationError) as caught:
        CallProver.open(bytes(16), key.sealed, ends=ENDS, kem=KEM)
    assert reason_of(caught) == "secret.sealed"
    with pytest.raises(VerificationError) as caught:
        CallProver.open(key.key_id[:15], key.sealed, ends=ENDS, kem=KEM)
    assert reason_of(caught) == "call.key.malformed"


def test_no_key_is_made_for_a_kem_key_that_is_none() -> None:
    with pytest.raises(VerificationError) as caught:
        CallKey(replace(CALLER, kem_public_key=b"short"), server=SERVER)
    assert reason_of(caught) == "key.kem.invalid"


@pytest.mark.parametrize("position", range(16, 56, 5))
def test_a_proof_with_another_bit_is_refused(position: int) -> None:
    key = CallKey(CALLER, server=SERVER)
    proof = bytearray(opened(key).prove(METHOD, b"r"))
    proof[position] ^= 1
    with pytest.raises(VerificationError) as caught:
        key.check(bytes(proof), method=METHOD, request_digest=request_digest(b"r"))
    assert reason_of(caught) == "call.proof.mismatch"


def test_keys_are_wiped_and_then_prove_nothing() -> None:
    key = CallKey(CALLER, server=SERVER)
    prover = opened(key)
    own, given_out = prover._key, key._key
    assert own == given_out != bytes(32)
    prover.close()
    key.close()
    assert (own, given_out) == (b"", bytes(32))
    with pytest.raises(UsageError):
        prover.prove(METHOD, b"")


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=60))
def test_a_counter_is_spent_once_and_only_within_the_window(counters: list[int]) -> None:
    window, spent, highest = ReplayWindow(), set(), 0
    for counter in counters:
        expected = ""
        if counter <= highest - WINDOW:
            expected = "call.proof.stale"
        elif counter in spent:
            expected = "call.proof.replayed"
        try:
            window.spend(counter)
            found = ""
        except VerificationError as error:
            found = error.reason
        assert found == expected
        spent.add(counter)
        highest = max(highest, counter)


def test_the_window_is_as_wide_as_it_says() -> None:
    window = ReplayWindow()
    window.spend(WINDOW + 1)
    window.spend(2)
    for counter, reason in ((1, "stale"), (0, "stale"), (2, "replayed"), (WINDOW + 1, "replayed")):
        with pytest.raises(VerificationError) as caught:
            window.spend(counter)
        assert reason_of(caught) == f"call.proof.{reason}"
    window.spend(1 << 63)
    window.spend((1 << 63) - WINDOW + 1)
