"""The PDU codec of the control side, with and without digests."""

import itertools

import pytest

from sealane import _native

_ENTRY = bytes(range(64))
_DATA = b"some data"
_DIGESTS = [
    {"header_digest": header, "data_digest": data}
    for header, data in itertools.product((False, True), repeat=2)
]


def _parts(pdu: bytes, **digests: bool) -> tuple[bytes, bytes]:
    _, header_bytes, data_bytes = _native.pdu_lengths(pdu[:8], 100, **digests)
    assert len(pdu) == header_bytes + data_bytes
    return pdu[:header_bytes], pdu[header_bytes:]


@pytest.mark.parametrize("digests", _DIGESTS)
def test_capsules_and_data_are_decoded_as_encoded(digests: dict[str, bool]) -> None:
    for pdu in (
        _native.encode_capsule_cmd(_ENTRY, _DATA, **digests),
        _native.encode_c2h_data(7, _DATA, **digests),
    ):
        head, tail = _parts(pdu, **digests)
        header = _native.decode_pdu(head, **digests)
        assert _native.pdu_data(header, tail) == _DATA
    bare = _native.encode_capsule_cmd(_ENTRY, b"", **digests)
    head, tail = _parts(bare, **digests)
    header = _native.decode_pdu(head, **digests)
    assert (header.entry, tail, _native.pdu_data(header, tail)) == (_ENTRY, b"", b"")
    response = _native.encode_capsule_resp(_ENTRY[:16], header_digest=digests["header_digest"])
    head, tail = _parts(response, **digests)
    assert (_native.decode_pdu(head, **digests).entry, tail) == (_ENTRY[:16], b"")


@pytest.mark.parametrize("digests", _DIGESTS)
def test_the_handshake_says_which_digests_and_carries_none(digests: dict[str, bool]) -> None:
    field = digests["header_digest"] + 2 * digests["data_digest"]
    for pdu in (_native.encode_ic_req(**digests), _native.encode_ic_resp(4096, **digests)):
        header = _native.decode_pdu(pdu)
        assert (len(pdu), header.digests, header.flags) == (128, field, 0)


def test_a_changed_header_ends_the_connection_and_changed_data_their_command() -> None:
    digests = {"header_digest": True, "data_digest": True}
    head, tail = _parts(_native.encode_capsule_cmd(_ENTRY, _DATA, **digests), **digests)
    header = _native.decode_pdu(head, **digests)
    for index in range(8, len(head)):
        changed = bytearray(head)
        changed[index] ^= 1
        with pytest.raises(_native.PduError) as refusal:
            _native.decode_pdu(bytes(changed), **digests)
        assert refusal.value.args[:2] == (3, int.from_bytes(changed[-4:], "little"))
    for index in range(len(tail)):
        changed = bytearray(tail)
        changed[index] ^= 1
        with pytest.raises(_native.DataDigestError):
            _native.pdu_data(header, bytes(changed))
    with pytest.raises(_native.DataDigestError):
        _native.pdu_data(header, tail[:3])


@pytest.mark.parametrize(("negotiated", "used"), list(itertools.permutations(_DIGESTS, 2)))
def test_other_digests_than_negotiated_are_refused(
    negotiated: dict[str, bool], used: dict[str, bool]
) -> None:
    pdu = _native.encode_capsule_cmd(_ENTRY, _DATA, **used)
    with pytest.raises(_native.PduError):
        _native.pdu_lengths(pdu[:8], 100, **negotiated)
