"""The card that `gateway.accelerator` names."""

from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.node.evidence.card import CardSource
from sealane.daemon.node.evidence.choose import source_of
from sealane.errors import UsageError


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
