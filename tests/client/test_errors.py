"""Errors as a job sees them: in a traceback, and from another process."""

import pickle

import pytest

from sealane import errors
from sealane.errors import Error, SectorVerificationError, SessionError

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Error)
]
SPECIAL = {
    SectorVerificationError: lambda: SectorVerificationError("sector.stale", "an old one", lba=7),
}


def made(kind: type[Error]) -> Error:
    return SPECIAL[kind]() if kind in SPECIAL else kind("session.closed", "it has ended")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[Error]) -> None:
    error = made(kind)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is kind
    assert (str(again), repr(again), vars(again)) == (str(error), repr(error), vars(error))


def test_a_traceback_names_the_reason() -> None:
    assert repr(SessionError("session.closed", "it has ended")) == (
        "SessionError('session.closed', 'it has ended')"
    )
