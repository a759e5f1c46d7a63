"""The cards that `gateway.accelerator` names."""

from collections.abc import Sequence

from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.evidence.card import CardSource
from sealane.daemon.node.evidence.choose import source_of
from sealane.errors import UsageError


def check_cards(labels: Sequence[str], enrolment: EnrolmentConfig | None) -> None:
    """Raise UsageError if a label has no card, or two of them have one socket."""
    sockets = [card_source(label, enrolment).socket for label in labels]
    if len({*sockets}) != len(sockets):
        raise UsageError(
            "config.value",
            f"gateway.accelerator {', '.join(labels)}; allowed: cards with a socket each",
        )


def card_source(label: str, enrolment: EnrolmentConfig | None) -> CardSource:
    """Return the source of the card of this label; UsageError if there is none."""
    secondary = [] if enrolment is None else enrolment.secondary
    found = [source_of(each) for each in secondary if each.label == label]
    card = next((source for source in found if isinstance(source, CardSource)), None)
    if card is None:
        raise UsageError(
            "config.value",
            f"gateway.accelerator {label!r}; allowed: the label of an enrolment.secondary of type "
            '"card"',
        )
    return card
