"""Checks a gateway's configuration as its start does, and changes nothing."""

from sealane.daemon.config import EnrolmentConfig, GatewayConfig
from sealane.daemon.gateway.card_source import card_source
from sealane.daemon.gateway.third_parties import third_party_of


def check_gateway(config: GatewayConfig, enrolment: EnrolmentConfig | None) -> None:
    """Raise UsageError as the gateway's start would."""
    for party in config.third_party:
        third_party_of(party)
    if config.accelerator is not None:
        card_source(config.accelerator, enrolment)
