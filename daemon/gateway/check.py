"""Checks a gateway's configuration as its start does, and changes nothing."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final

from sealane.daemon.config import EnrolmentConfig, GatewayConfig
from sealane.daemon.gateway.card_source import check_cards
from sealane.daemon.gateway.third_parties import third_party_of
from sealane.daemon.runtime.listeners import split_address

_CONNECT_SECONDS: Final = 3.0


def check_gateway(config: GatewayConfig, enrolment: EnrolmentConfig | None) -> None:
    """Raise UsageError as the gateway's start would."""
    for party in config.third_party:
        third_party_of(party)
    check_cards(config.accelerator, enrolment)


def unreachable(config: GatewayConfig, *, own_node: str) -> Iterator[str]:
    """Connect to each target but this daemon's own; yield a line for each that doesn't answer.

    Only TCP: who answers is known after enrolment. All of it, with the resolution of names, takes
    no longer than `_CONNECT_SECONDS`.
    """
    others = {node: each for node, each in config.addresses.items() if node != own_node}
    deadline = time.monotonic() + _CONNECT_SECONDS
    asked = {node: _asked(address) for node, address in others.items()}
    for node, answer in asked.items():
        try:
            problem = answer.result(max(0, deadline - time.monotonic()))
        except TimeoutError:
            problem = f"no answer within {_CONNECT_SECONDS:g} s"
        if problem:
            yield f"target {node} at {others[node]}: {problem}; its volumes wait until it answers"


def _asked(address: str) -> Future[str]:
    """Connect to `address` in a thread of its own, which nobody waits for at the end.

    The system's resolver takes no timeout.
    """
    answer: Future[str] = Future()
    threading.Thread(
        target=lambda: answer.set_result(_problem(address)), name="connect", daemon=True
    ).start()
    return answer


def _problem(address: str) -> str:
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError as error:
        return f"its name can't be encoded: {error}"
    return ""
