"""Kinds of evidence from other distributions: entry points of the group `sealane.evidence`.

The name of an entry point is the kind; its object is a `Kind`. Nothing of it is imported before a
configuration or a policy names the kind.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol, cast

from sealane.crypto.evidence.verifier import EvidenceVerifier
from sealane.errors import UsageError

GROUP: Final = "sealane.evidence"


class Kind(Protocol):
    """The two halves of a kind; a node needs only the driver, a broker only the verifier."""

    def verifier(self) -> EvidenceVerifier:
        """Return the verifier; its `evidence_type` is the name of the entry point."""

    def open_driver(self, settings: Mapping[str, str]) -> Any:
        """Return a `Driver` (`sealane.daemon.node.evidence.driver`); blocking.

        `settings` is `[enrolment.settings]`.
        """


def names() -> frozenset[str]:
    """Return the kinds that installed distributions offer."""
    return frozenset(found.name for found in entry_points(group=GROUP))


def load(name: str) -> Kind:
    """Import a kind; UsageError `evidence.kind.unknown`, `.ambiguous` or `.failed`."""
    found = [*entry_points(group=GROUP, name=name)]
    if not found:
        raise UsageError(
            "evidence.kind.unknown", f"no installed distribution offers {GROUP} {name!r}"
        )
    if len(found) > 1:
        offers = ", ".join(sorted(map(_origin, found)))
        raise UsageError("evidence.kind.ambiguous", f"{GROUP} {name!r} is offered by {offers}")
    try:
        return cast("Kind", found[0].load())
    except Exception as error:
        raise UsageError(
            "evidence.kind.failed", f"{GROUP} {name!r} of {_origin(found[0])}: {error!r}"
        ) from error


def load_verifier(name: str) -> EvidenceVerifier:
    """Import a kind's verifier; UsageError `evidence.kind.…`."""
    try:
        verifier = load(name).verifier()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError("evidence.kind.failed", f"{GROUP} {name!r}: {error!r}") from error
    if verifier.evidence_type != name:
        raise UsageError(
            "evidence.kind.failed",
            f"{GROUP} {name!r}: its verifier says it is of type {verifier.evidence_type!r}",
        )
    return verifier


def installed_verifier(name: str) -> EvidenceVerifier | None:
    """Import a kind's verifier; None if no installed distribution offers the kind."""
    return load_verifier(name) if name in names() else None


def _origin(found: EntryPoint) -> str:
    return f"{found.dist.name if found.dist else 'an unknown distribution'} ({found.value})"
