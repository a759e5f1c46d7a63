"""Checks a gateway's configuration as its start does, and changes nothing."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sealane.daemon.config import EnrolmentConfig, GatewayConfig
from sealane.daemon.gateway.card_source import card_source
from sealane.daemon.gateway.third_parties import third_party_of
from sealane.daemon.runtime.listeners import split_address

_CONNECT_SECONDS: Final = 3.0


def check_gateway(config: GatewayConfig, enrolment: EnrolmentConfig | None) -> None:
    """Raise UsageError as the gateway's start would."""
    for party in config.third_party:
        third_party_of(party)
    if config.accelerator is not None:
        card_source(config.accelerator, enrolment)


def unreachable(config: GatewayConfig, *, own_node: str) -> Iterator[str]:
    """Connect to each target but this daemon's own; yield a line for each that doesn't answer.

    Only TCP: who answers is known after enrolment. Takes a few seconds at most.
    """
    others = {node: each for node, each in config.addresses.items() if node != own_node}
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        for node, problem in zip(others, pool.map(_problem, others.values()), strict=True):
            if problem:
                yield (
                    f"target {node} at {others[node]}: {problem}; its volumes wait until it answers"
                )


def _problem(address: str) -> str:
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
