"""An independent implementation of the tree's node functions, compared with the engine's tests.

`docs/decisions/0024-node-function.md` defines them.
"""

import hmac
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

VECTORS = Path(__file__).parents[2] / "native/proto/src/freshness/node_vectors.txt"
SECRET = bytes([7] * 32)
PAGE = bytes((index % 251 + index // 251) % 256 for index in range(4096))


def derived(label: str) -> bytes:
    """Return the key for a use."""
    info = bytes([len(label)]) + label.encode()
    return HKDFExpand(SHA256(), 32, info).derive(SECRET)


def encrypted(label: str, word: int) -> int:
    """Encrypt a block under the key for a use."""
    encryptor = Cipher(algorithms.AES256(derived(label)), modes.ECB()).encryptor()  # noqa: S305
    return int.from_bytes(encryptor.update(word.to_bytes(16, "little")), "little")


def mask(place: int) -> int:
    """Return the mask of a position."""
    return encrypted("sealane freshness masks", place)


def leaf_node(leaf: int, page: bytes) -> int:
    """Return the node of a leaf page."""
    words = [int.from_bytes(page[at : at + 16], "little") for at in range(0, 4096, 16)]
    total = 0
    for place, word in enumerate([*words, leaf]):
        total ^= encrypted("sealane freshness leaf", word ^ mask(place))
    return encrypted("sealane freshness node", total)


def inner_node(level: int, children: dict[int, int]) -> int:
    """Return the node on a level over children by position; missing ones are void."""
    total = 0
    for place, child in children.items():
        for word in (0, child):
            total ^= encrypted("sealane freshness inner", word ^ mask((level + 1 << 16) + place))
    return total


def root_tag(leaf_count: int, top: int) -> int:
    """Return the visible tag of a root."""
    message = b"\0" + leaf_count.to_bytes(8, "little") + top.to_bytes(16, "little")
    tag = hmac.digest(derived("sealane freshness root"), message, "sha256")
    return int.from_bytes(tag[:16], "little")


def test_node_functions_give_the_vectors() -> None:
    found = {"leaf": leaf_node(3, PAGE), "inner": inner_node(1, {2: 77}), "root": root_tag(20, 5)}
    lines = [f"{name} {word.to_bytes(16, 'little').hex()}\n" for name, word in found.items()]
    assert "".join(lines) == VECTORS.read_text()
