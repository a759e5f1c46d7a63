"""The key agreement of a secure queue: nobody between the ends can lower its version."""

from dataclasses import dataclass

import pytest

from compat.golden_wires import queue_offer
from sealane.crypto.kem import X25519KemKey
from sealane.crypto.queue import VERSION
from sealane.crypto.share import new_share, open_share, seal_share
from sealane.errors import VerificationError


@dataclass
class Later:
    """An offer of the next version."""

    def encode(self) -> bytes:
        label = f"sealane queue offer v{VERSION}".encode()
        encoded = queue_offer().encode()
        assert label in encoded
        return encoded.replace(label, f"sealane queue offer v{VERSION + 1}".encode())


def test_a_share_for_a_later_version_is_not_opened_for_this_one() -> None:
    key = X25519KemKey.create()
    sealed = seal_share(
        new_share(), Later(), kem_algorithm=key.algorithm, public_key=key.public_key
    )
    with pytest.raises(VerificationError, match=r"secret\.sealed"):
        open_share(sealed, queue_offer(), key=key)
