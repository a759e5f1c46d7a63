"""Identify Namespace: the format data that a host needs to store sectors on third-party blocks."""

import uuid

import pytest

from sealane.daemon.gateway.third_party_link import ThirdParty, check_format
from sealane.errors import UsageError
from sealane.protocol.nvme.identify import NamespaceIdentity, decode_namespace, encode_namespace
from sealane.protocol.nvme.subsystem import volume_subsystem

PARTY = ThirdParty(name="a", traddr="127.0.0.1", trsvcid=1, subsystem_nqn="nqn.x", namespace_id=1)


@pytest.mark.parametrize("metadata_bytes", [0, 64])
def test_format_and_protection_come_back(metadata_bytes: int) -> None:
    subsystem = volume_subsystem(
        nqn="nqn.x",
        volume_id=uuid.uuid4(),
        serial="s",
        block_count=10,
        metadata_bytes=metadata_bytes,
        transfer_max=131_072,
    )
    page = bytearray(encode_namespace(subsystem, subsystem.namespaces[0]))
    found = decode_namespace(bytes(page))
    assert (found.block_bytes, found.metadata_bytes) == (4096, metadata_bytes)
    assert (found.is_extended, found.protection_type) == (metadata_bytes > 0, 0)
    page[29] = 0x0A
    assert decode_namespace(bytes(page)).protection_type == 2


def _identity(
    block_bytes: int, metadata_bytes: int, *, is_extended: bool = True, protection_type: int = 0
) -> NamespaceIdentity:
    return NamespaceIdentity(
        block_count=1,
        block_bytes=block_bytes,
        metadata_bytes=metadata_bytes,
        is_extended=is_extended,
        protection_type=protection_type,
    )


def test_only_metadata_that_holds_a_sectors_is_taken() -> None:
    check_format(PARTY, _identity(4096, 64))
    check_format(PARTY, _identity(512, 0, is_extended=False))
    for identity in (
        _identity(4096, 8),
        _identity(4096, 128),
        _identity(512, 64),
        _identity(4096, 64, is_extended=False),
        _identity(4096, 64, protection_type=1),
    ):
        with pytest.raises(UsageError) as caught:
            check_format(PARTY, identity)
        assert caught.value.reason == "third_party.format"
