"""Parsing of an untrusted controller's lists, logs and events by a host."""

import contextlib
import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealane.errors import ProtocolError
from sealane.protocol.nvme.constants import AnaState
from sealane.protocol.nvme.host_pages import (
    DISCOVERY_ENTRY_BYTES,
    DiscoveryEntry,
    Notice,
    ana_log_length,
    decode_active_namespaces,
    decode_ana_log,
    decode_changed_namespaces,
    decode_descriptors,
    decode_discovery_entry,
    decode_discovery_header,
    decode_event,
)

LIMIT = 65_536


def ana_log(*groups: tuple[int, list[int]]) -> bytes:
    log = struct.pack("<QH6x", 9, len(groups))
    for number, (state, ids) in enumerate(groups, 1):
        log += struct.pack("<IIQB15x", number, len(ids), 1, state)
        log += struct.pack(f"<{len(ids)}I", *ids)
    return log


def numbers(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids).ljust(4096, b"\0")


def test_a_list_ends_with_its_first_zero() -> None:
    assert decode_active_namespaces(numbers(1, 5, 9)) == [1, 5, 9]
    assert decode_active_namespaces(numbers(*range(1, 1025))) == list(range(1, 1025))


@pytest.mark.parametrize("ids", [(2, 1), (3, 3)])
def test_a_list_out_of_order_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode_active_namespaces(numbers(*ids))


def test_too_many_changes_mean_any() -> None:
    assert decode_changed_namespaces(numbers(0xFFFF_FFFF)) is None
    assert decode_changed_namespaces(numbers(4)) == [4]


def test_ana_states_come_by_namespace() -> None:
    log = ana_log((1, [1, 3]), (2, [2]), (0x0F, []), (7, [4]))
    assert decode_ana_log(log + bytes(100)) == {
        1: AnaState.OPTIMIZED,
        3: AnaState.OPTIMIZED,
        2: AnaState.NON_OPTIMIZED,
        4: AnaState.INACCESSIBLE,  # an unknown state
    }


def test_every_truncation_of_an_ana_log_is_refused_and_measured() -> None:
    log = ana_log((1, [1, 3]), (2, [2]))
    for length in range(len(log)):
        with pytest.raises(ProtocolError):
            decode_ana_log(log[:length])
        if length >= 16:
            assert length < ana_log_length(log[:length], LIMIT) <= len(log)
    assert ana_log_length(log, LIMIT) == len(log)


def test_an_ana_log_of_any_claimed_length_is_bounded() -> None:
    endless = struct.pack("<QH6x", 1, 0xFFFF) + struct.pack("<IIQB15x", 1, 0xFFFF_FFFF, 1, 1)
    assert ana_log_length(endless, LIMIT) == LIMIT
    with pytest.raises(ProtocolError):
        decode_ana_log(endless)


def test_descriptors_are_told_apart() -> None:
    name = uuid.UUID(int=77)
    data = b"\1\x08\0\0" + b"e" * 8 + b"\2\x10\0\0" + b"g" * 16 + b"\3\x10\0\0" + name.bytes
    data += b"\x77\2\0\0??" + b"\4\1\0\0\0"
    names = decode_descriptors(data.ljust(4096, b"\0"))
    assert (names.eui64, names.nguid) == (b"e" * 8, b"g" * 16)
    assert (names.uuid, names.command_set) == (name, 0)


@pytest.mark.parametrize("data", [b"\3\x08\0\0" + bytes(8), b"\2\x10\0\0short", b"\1\0\0\0"])
def test_malformed_descriptors_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_descriptors(data)


@pytest.mark.parametrize(
    ("result", "notice"),
    [
        (0x04_00_02, Notice.NAMESPACES),
        (0x0C_03_02, Notice.ANA),
        (0x70_F0_02, Notice.DISCOVERY),
        (0x01_00_00, None),
    ],
)
def test_events_name_their_log(result: int, notice: Notice | None) -> None:
    event = decode_event(result)
    assert event.notice is notice
    assert notice is None or event.page == notice.page


def entry(**fields: bytes) -> bytes:
    data = bytearray(DISCOVERY_ENTRY_BYTES)
    data[0:3] = bytes([DiscoveryEntry.TCP, DiscoveryEntry.IPV4, DiscoveryEntry.NVM])
    struct.pack_into("<HH", data, 4, 3, 0xFFFF)
    data[32:64] = fields.get("trsvcid", b"4420").ljust(32)
    data[256:512] = fields.get("subnqn", b"nqn.2024-01.org.example:x").ljust(256, b"\0")
    data[512:768] = fields.get("traddr", b"192.0.2.1").ljust(256)
    return bytes(data)


def test_a_discovery_entry_is_read() -> None:
    assert decode_discovery_entry(entry()) == DiscoveryEntry(
        transport=3,
        address_family=1,
        subsystem_type=2,
        port_id=3,
        controller_id=0xFFFF,
        trsvcid="4420",
        subsystem_nqn="nqn.2024-01.org.example:x",
        traddr="192.0.2.1",
    )


def test_malformed_discovery_logs_are_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_discovery_entry(entry()[:-1])
    with pytest.raises(ProtocolError):
        decode_discovery_entry(entry(traddr=b"\xff\xfe"))
    with pytest.raises(ProtocolError):
        decode_discovery_header(bytes(1023))
    with pytest.raises(ProtocolError):
        decode_discovery_header(struct.pack("<QQH", 1, 1, 1).ljust(1024, b"\0"))


@given(data=st.binary(max_size=300))
def test_noise_is_decoded_or_refused(data: bytes) -> None:
    for decode in (decode_ana_log, decode_descriptors, decode_discovery_header):
        with contextlib.suppress(ProtocolError):
            decode(data)
