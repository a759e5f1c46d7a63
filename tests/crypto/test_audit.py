"""The chain of audit records: any change, removal, insertion or foreign checkpoint is detected."""

import datetime as dt
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.anchors import SuccessiveKeys
from sealane.crypto.audit import GENESIS, LINE_BYTES_MAX, Chain, Detail, Head, Record, verify_log
from sealane.crypto.encoding import JSON, canonical_json
from sealane.errors import UsageError, VerificationError

NOW = dt.datetime(2026, 11, 1, 12, tzinfo=dt.UTC)
KEY = ec.generate_private_key(ec.SECP256R1())


def entry(chain: Chain, subject: str = "s", **detail: Detail) -> bytes:
    return chain.append(
        "lease.grant", subject=subject, outcome="granted", reason="", detail=detail, now=NOW
    )


def log() -> list[bytes]:
    chain = Chain()
    made = [entry(chain, counter_start=n) for n in range(3)]
    made.append(chain.checkpoint(KEY, now=NOW))
    made += [entry(chain, counter_start=n) for n in range(3, 5)]
    return [line.removesuffix(b"\n") for line in made]


def reason_of(lines: list[bytes], key: ec.EllipticCurvePrivateKey = KEY) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_log(lines, signer=key.public_key())
    return caught.value.reason


def test_whole_log_verifies_and_says_how_much_is_signed() -> None:
    reader = verify_log(log(), signer=KEY.public_key())
    assert (reader.head.sequence, reader.signed_sequence) == (6, 3)
    reader.require(reader.head)


def test_keys_succeed_each_other_and_none_comes_back() -> None:
    keys = [KEY, *(ec.generate_private_key(ec.SECP256R1()) for _ in range(2))]

    def signed_by(*order: int) -> list[bytes]:
        chain = Chain()
        made = [chain.checkpoint(keys[each], now=NOW) for each in order]
        return [line.removesuffix(b"\n") for line in made]

    def signer() -> SuccessiveKeys:
        return SuccessiveKeys(key.public_key() for key in keys)

    for order in ((0, 0, 1, 1, 2), (0, 2), (1,)):
        successive = signer()
        assert verify_log(signed_by(*order), signer=successive).signed_sequence == len(order) - 1
        assert successive.signed_by == order[-1]
    for order in ((1, 0), (0, 1, 2, 1)):
        with pytest.raises(VerificationError) as refused:
            verify_log(signed_by(*order), signer=signer())
        assert refused.value.reason == "audit.checkpoint.signature"


@pytest.mark.parametrize("position", range(5))
def test_removed_record_shows(position: int) -> None:
    lines = log()
    del lines[position]
    assert reason_of(lines) == ("audit.chain.broken" if position else "audit.beginning.missing")


def test_number_out_of_turn_shows() -> None:
    chain = Chain()
    first = entry(chain).removesuffix(b"\n")
    chain.head = Head(sequence=7, digest=chain.head.digest)
    assert reason_of([first, entry(chain).removesuffix(b"\n")]) == "audit.chain.broken"


def test_changed_record_shows_at_the_next_one() -> None:
    lines = log()
    lines[1] = lines[1].replace(b'"counter_start":1', b'"counter_start":7')
    assert reason_of(lines) == "audit.chain.broken"


def test_rewritten_log_shows_at_its_checkpoint() -> None:
    chain = Chain()
    forged = [entry(chain, counter_start=9)]
    other = ec.generate_private_key(ec.SECP256R1())
    forged.append(chain.checkpoint(other, now=NOW))
    lines = [line.removesuffix(b"\n") for line in forged]
    assert reason_of(lines) == "audit.checkpoint.signature"
    # A checkpoint of another position in the chain doesn't help.
    chain = Chain()
    first = entry(chain).removesuffix(b"\n")
    checkpoint = chain.checkpoint(KEY, now=NOW).removesuffix(b"\n")
    signature = Record.decode(checkpoint).detail["signature"]
    chain = Chain()
    lines = [
        entry(chain).removesuffix(b"\n"),
        entry(chain).removesuffix(b"\n"),
        chain.append(
            "audit.checkpoint",
            subject="broker",
            outcome="done",
            reason="",
            detail={"signature": str(signature)},
            now=NOW,
        ).removesuffix(b"\n"),
    ]
    assert first == lines[0]
    assert reason_of(lines) == "audit.checkpoint.signature"


def test_cut_log_shows_against_a_head_kept_elsewhere() -> None:
    whole = verify_log(log(), signer=None)
    for end in range(6):
        reader = verify_log(log()[:end], signer=None)
        with pytest.raises(VerificationError) as caught:
            reader.require(whole.head)
        assert caught.value.reason == "audit.truncated"


def test_texts_of_strangers_stay_on_their_line() -> None:
    chain = Chain()
    line = entry(chain, subject='x\n{"kind":"forged"}\x1b[2J' + "é" * 9999, key=b"\0\xff")
    assert line.count(b"\n") == 1
    assert len(line) < LINE_BYTES_MAX
    record = Record.decode(line.removesuffix(b"\n"))
    assert record.subject.startswith('x?{"kind":"forged"}?[2J?')
    assert record.detail == {"key": "00ff"}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[" * 9000,
        b'{"sequence":1}',
        log()[0] + b" ",
        log()[0].replace(b'"sequence":1', b'"sequence":"1"'),
        log()[0].replace(b'"time":"2026', b'"time":"x026'),
        log()[0].replace(b'"kind":"', b'"kind":"x - - '),
        log()[0].replace(b'"detail":{', b'"detail":{"\xc3\xa9":1,'),
    ],
)
def test_what_is_no_record_is_refused(line: bytes) -> None:
    assert reason_of([line]) == "audit.record.malformed"


def test_record_of_what_is_too_wordy_is_shortened() -> None:
    chain = Chain()
    texts = {f"name{n}": "x" * 500 for n in range(60)}
    lists = {"types": ["y" * 500] * 64}
    for detail in (texts, lists):
        line = entry(chain, **detail)
        assert len(line) <= LINE_BYTES_MAX
        assert Record.decode(line.removesuffix(b"\n")).detail.keys() == detail.keys()
    short = entry(chain, types=["y"] * 64)
    assert len(Record.decode(short.removesuffix(b"\n")).detail["types"]) == 64  # type: ignore[arg-type]


def test_record_that_is_too_large_is_the_callers_mistake() -> None:
    chain = Chain()
    with pytest.raises(UsageError) as caught:
        entry(chain, **{f"{n}{'name' * 40}": "x" for n in range(60)})
    assert caught.value.reason == "audit.record.size"
    assert chain.head == GENESIS
    with pytest.raises(UsageError):
        chain.append("Bad Kind", subject="", outcome="done", reason="", detail={}, now=NOW)


def test_heads_name_the_line() -> None:
    chain = Chain()
    entry(chain)
    assert chain.head != Head(sequence=1, digest=bytes(32))


@pytest.mark.parametrize(
    "change",
    [{"more": "x"}, {"detail": "x"}, {"detail": []}, {"sequence": "1"}, {"outcome": 7}],
    ids=["member", "text", "list", "number", "outcome"],
)
def test_line_that_is_no_record_is_refused(change: dict[str, JSON]) -> None:
    values = json.loads(log()[0])
    assert Record.decode(canonical_json(values)).sequence == 1
    for line in (canonical_json({**values, **change}), canonical_json({"sequence": 1})):
        with pytest.raises(VerificationError, match=r"audit\.record\.malformed"):
            Record.decode(line)


def test_line_that_does_not_follow_is_not_taken_over() -> None:
    first, second, *_ = log()
    chain = Chain()
    with pytest.raises(VerificationError, match=r"audit\.chain\.broken"):
        chain.follow(second)
    assert chain.follow(first).sequence == 1
    assert chain.follow(second).sequence == 2


def test_record_has_a_bounded_number_of_details() -> None:
    chain = Chain()
    entry(chain, **{f"d{n}": n for n in range(64)})
    with pytest.raises(UsageError, match=r"audit\.record\.malformed"):
        entry(chain, **{f"d{n}": n for n in range(65)})
