"""The reference implementation of the erasure code: self-consistency and the kernels' vectors."""

import itertools

from reference import erasure


def test_vectors_are_those_of_the_reference() -> None:
    assert erasure.VECTORS.read_text() == erasure.vectors()


def test_any_k_symbols_give_the_data_back() -> None:
    k, m = 4, 3
    data = erasure.sample(k, 5)
    symbols = dict(enumerate([*data, *erasure.encode(data, m)]))

    for kept in itertools.combinations(range(k + m), k):
        assert erasure.decode({index: symbols[index] for index in kept}, k) == data
