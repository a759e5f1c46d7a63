"""Which volumes that couldn't be opened are tried again."""

import pytest

from sealane.daemon.target.unopened import Unopened
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.v1 import broker_pb2


def test_a_store_that_was_rolled_back_is_not_tried_again() -> None:
    reported: list[tuple[str, Error]] = []
    unopened = Unopened(lambda volume_id, error: reported.append((volume_id, error)))
    old, away = (broker_pb2.VolumeDescriptor(volume_id=name, tenant="acme") for name in "ab")
    with unopened.kept("a", old):
        raise VerificationError("store.rolled_back", "older")
    with unopened.kept("b", away):
        raise UnavailableError("store.open", "no answer")
    assert {*unopened.passing()} == {"b"}
    unopened.check("acme", "a")
    with pytest.raises(UnavailableError):
        unopened.check("acme", "b")
    assert [volume_id for volume_id, _ in reported] == ["a", "b"]
