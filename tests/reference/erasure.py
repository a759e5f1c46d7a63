"""A naive implementation of the erasure code in session-wire.md, as reference for the kernels.

`python tests/reference/erasure.py` writes the vectors that the Rust tests read.
"""

import itertools
from pathlib import Path

POLYNOMIAL = 0x11D
VECTORS = Path(__file__).parents[2] / "native" / "erasure" / "tests" / "vectors.txt"
SHAPES = ((1, 1, 3), (4, 1, 5), (4, 2, 16), (10, 4, 7), (32, 8, 3), (100, 9, 2))
"""k, m and bytes of a symbol of each vector."""


def product(a: int, b: int) -> int:
    """Multiply two elements of GF(2^8)."""
    total = 0
    for bit in range(8):
        if b >> bit & 1:
            total ^= a << bit
    for bit in range(14, 7, -1):
        if total >> bit & 1:
            total ^= POLYNOMIAL << (bit - 8)
    return total


def inverse(a: int) -> int:
    """Return the element whose product with `a` is 1."""
    return next(b for b in range(1, 256) if product(a, b) == 1)


def coefficient(parity: int, data: int) -> int:
    """Return the coefficient of data symbol `data` in parity symbol `parity`."""
    return product(255 ^ data, inverse((255 - parity) ^ data))


def encode(data: list[bytes], m: int) -> list[bytes]:
    """Compute the m parity symbols."""
    parity = []
    for row in range(m):
        factors = [coefficient(row, column) for column in range(len(data))]
        terms = [
            [product(factor, byte) for byte in symbol]
            for factor, symbol in zip(factors, data, strict=True)
        ]
        parity.append(bytes(_sum(column) for column in zip(*terms, strict=True)))
    return parity


def decode(symbols: dict[int, bytes], k: int) -> list[bytes]:
    """Recover the data from k symbols by Gaussian elimination; indices from k on are parity."""
    rows = []
    for index in sorted(symbols)[:k]:
        if index < k:
            row = [int(column == index) for column in range(k)]
        else:
            row = [coefficient(index - k, column) for column in range(k)]
        rows.append(row + list(symbols[index]))
    for column in range(k):
        pivot = next(i for i in range(column, k) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = inverse(rows[column][column])
        rows[column] = [product(scale, value) for value in rows[column]]
        for other in range(k):
            if other != column and (factor := rows[other][column]):
                pairs = zip(rows[other], rows[column], strict=True)
                rows[other] = [value ^ product(factor, base) for value, base in pairs]
    return [bytes(row[k:]) for row in rows]


def sample(k: int, length: int) -> list[bytes]:
    """Return the data of a vector."""
    return [bytes((i * 37 + j * 101 + i * j) % 256 for j in range(length)) for i in range(k)]


def vectors() -> str:
    """Yield a line per vector: k, m, symbol bytes, then each parity symbol."""
    lines = []
    for k, m, length in SHAPES:
        parity = encode(sample(k, length), m)
        lines.append(" ".join([str(k), str(m), str(length), *(symbol.hex() for symbol in parity)]))
    return "\n".join(lines) + "\n"


def _sum(values: tuple[int, ...]) -> int:
    return list(itertools.accumulate(values, lambda a, b: a ^ b))[-1]


if __name__ == "__main__":
    VECTORS.write_text(vectors())
