"""NVMe structures of the control side: round trips, truncations, flips, and every admin answer."""

import contextlib
import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealane import _native
from sealane.errors import ProtocolError, UsageError
from sealane.protocol.nvme import constants, discovery, identify
from sealane.protocol.nvme.command import decode_completion, encode_completion
from sealane.protocol.nvme.connect import TICKET_OFFSET, Connect, decode_connect
from sealane.protocol.nvme.nqn import check_nqn, export_nqn, gateway_nqn, volume_nqn
from sealane.protocol.nvme.subsystem import volume_subsystem

VOLUME = uuid.UUID(int=0x1234)
HOST = "nqn.2026-11.dev.sealane:host"
SUBSYSTEM = volume_subsystem(
    nqn=volume_nqn(VOLUME),
    volume_id=VOLUME,
    serial="0123456789",
    block_count=1000,
    metadata_bytes=64,
    transfer_max=262_144,
)


def connect(**changes: object) -> Connect:
    fields: dict[str, object] = {
        "command_id": 7,
        "queue_id": 3,
        "queue_size": 64,
        "keep_alive_ms": 5000,
        "host_id": uuid.UUID(int=9),
        "controller_id": 2,
        "subsystem_nqn": SUBSYSTEM.nqn,
        "host_nqn": HOST,
        "ticket": bytes(range(16)),
    }
    return Connect(**(fields | changes))  # type: ignore[arg-type]


@given(
    command_id=st.integers(0, 0xFFFF),
    queue_id=st.integers(0, 0xFFFF),
    queue_size=st.integers(1, 0x1_0000),
    keep_alive_ms=st.integers(0, 0xFFFF_FFFF),
    disable_flow_control=st.booleans(),
    ticket=st.binary(min_size=16, max_size=16),
    host_id=st.uuids(),
)
def test_connect_survives_the_wire(**fields: object) -> None:
    original = connect(**fields)
    assert decode_connect(*original.encode()) == original


def test_ticket_lies_in_the_reserved_bytes_of_the_connect_data() -> None:
    _, data = connect().encode()
    assert TICKET_OFFSET == 768
    assert data[768:784] == bytes(range(16))
    assert not any(data[784:])


@pytest.mark.parametrize("length", [0, 1, 1023])
def test_truncated_connect_data_is_refused(length: int) -> None:
    entry, data = connect().encode()
    with pytest.raises(ProtocolError):
        decode_connect(entry, data[:length])


@given(data=st.binary(min_size=1024, max_size=1024))
def test_arbitrary_connect_data_decodes_or_is_a_protocol_error(data: bytes) -> None:
    made, _ = connect().encode()
    with contextlib.suppress(ProtocolError):
        assert decode_connect(made, data).ticket == data[768:784]


@pytest.mark.parametrize(("offset", "value"), [(0, 0x06), (4, 0x04), (32, 0xFF)])
def test_another_command_than_connect_is_refused(offset: int, value: int) -> None:
    entry, data = connect().encode()
    changed = bytearray(entry)
    changed[offset] = value
    with pytest.raises(ProtocolError):
        decode_connect(bytes(changed), data)


def test_identify_says_what_the_subsystem_is() -> None:
    controller = identify.decode_controller(identify.encode_controller(SUBSYSTEM, controller_id=5))
    assert (controller.controller_id, controller.subsystem_nqn) == (5, SUBSYSTEM.nqn)
    assert (controller.transfer_max, controller.in_capsule_max) == (262_144, 8192)
    assert controller.volatile_write_cache
    namespace = identify.decode_namespace(
        identify.encode_namespace(SUBSYSTEM, SUBSYSTEM.namespaces[0])
    )
    assert namespace == identify.NamespaceIdentity(
        block_count=1000, block_bytes=4096, metadata_bytes=64, is_extended=True
    )


@pytest.mark.parametrize("length", [0, 4095, 4097])
def test_identify_data_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError):
        identify.decode_controller(bytes(length))
    with pytest.raises(ProtocolError):
        identify.decode_namespace(bytes(length))


@given(mdts=st.integers(0, 255), capsule=st.integers(0, 0xFFFF_FFFF))
def test_what_a_controller_claims_is_bounded(mdts: int, capsule: int) -> None:
    data = bytearray(identify.encode_controller(SUBSYSTEM, controller_id=1))
    data[77] = mdts
    struct.pack_into("<I", data, 1792, capsule)
    claimed = identify.decode_controller(bytes(data))
    assert 0 <= claimed.transfer_max <= 4096 << 20
    assert claimed.in_capsule_max >= 0


@given(exponent=st.integers(0, 255))
def test_block_sizes_out_of_range_are_refused(exponent: int) -> None:
    data = bytearray(identify.encode_namespace(SUBSYSTEM, SUBSYSTEM.namespaces[0]))
    data[130] = exponent
    with contextlib.nullcontext() if 9 <= exponent <= 16 else pytest.raises(ProtocolError):
        assert identify.decode_namespace(bytes(data)).block_bytes == 1 << exponent


@pytest.mark.parametrize(
    "text",
    ["", "nqn", "nqn.2026-13.dev.x:a", "nqn.2026-11.dev.x:a b", f"nqn.2026-11.d:{'x' * 223}"],
)
def test_bad_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        check_nqn(text)


def test_our_own_names_are_names() -> None:
    for name in (volume_nqn(VOLUME), export_nqn(VOLUME), gateway_nqn("g-1")):
        assert check_nqn(name) == name


# Status codes and layouts


def test_status_names_agree_with_the_engine() -> None:
    for code in constants.Status:
        assert _native.status_name(code) is not None, code
    assert decode_completion(encode_completion(3, status=0x182, result=9)) == (3, 0x182, 9)


def test_sector_layout_is_the_documented_one() -> None:
    assert _native.sector_layout() == {
        "tag": (0, 16),
        "iv": (16, 28),
        "mac": (28, 44),
        "key_epoch": (44, 48),
        "sequence": (48, 54),
        "checksum": (54, 62),
        "version": (62, 63),
        "flags": (63, 64),
    }


# PDU codec through its bindings


def test_encoded_pdus_decode() -> None:
    submission = bytes(range(64))
    pdu = _native.encode_capsule_cmd(submission, b"abc")
    assert _native.pdu_lengths(pdu[:8], 3) == (constants.PduKind.CAPSULE_CMD, 72, 3)
    assert bytes(_native.decode_pdu(pdu[:72]).entry) == submission
    assert _native.decode_pdu(_native.encode_ic_resp(8192)).limit == 8192
    data = _native.decode_pdu(_native.encode_c2h_data(5, b"1234")[:24])
    assert (data.cid, data.offset, data.length) == (5, 0, 4)
    assert _native.decode_pdu(_native.encode_termination(True, 3, 9, b"")).cid == 3


@pytest.mark.parametrize("length", range(128))
def test_every_truncated_header_is_refused(length: int) -> None:
    with pytest.raises(_native.PduError):
        _native.decode_pdu(_native.encode_ic_req()[:length])


def test_data_beyond_the_limit_is_refused_by_its_header() -> None:
    pdu = _native.encode_capsule_cmd(bytes(64), bytes(9))
    with pytest.raises(_native.PduError):
        _native.pdu_lengths(pdu[:8], 8)


@pytest.mark.parametrize("status", constants.Status)
def test_only_an_error_that_passes_may_be_retried(status: constants.Status) -> None:
    field = struct.unpack_from("<H", encode_completion(1, status=int(status)), 14)[0] >> 1
    passes = status in {constants.Status.SUCCESS, constants.Status.CONNECT_BUSY}
    assert bool(field & constants.DO_NOT_RETRY) != passes


def test_discovery_leaves_the_secure_channel_open() -> None:
    record = discovery.DiscoveryRecord(subsystem_nqn=SUBSYSTEM.nqn, traddr="::1", trsvcid=4420)
    log = discovery.encode_discovery_log([record], generation=1)
    # libnvme 1.3 treats "not required" (2) as a request for TLS.
    assert log[1024 + 3] & 0x03 == 0
