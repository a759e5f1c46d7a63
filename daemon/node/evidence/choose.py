"""The evidence driver that a configuration means. Its module is imported where it is configured.

A driver's module has `check(config)` and `open_driver(config, *, tcti)`; its row is in
`sealane.daemon.config.EVIDENCE_DRIVERS`.
"""

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from sealane.daemon.config import (
    EVIDENCE_DRIVERS,
    EnrolmentConfig,
    SecondaryEvidenceConfig,
)
from sealane.daemon.node.evidence.card import CardSource
from sealane.daemon.node.evidence.driver import Driver, SecondarySource
from sealane.daemon.node.evidence.secondary import CommandSource
from sealane.daemon.runtime import third_party_evidence


class _Module(Protocol):
    def check(self, config: EnrolmentConfig) -> None: ...

    def open_driver(self, config: EnrolmentConfig, *, tcti: str) -> Driver: ...


def open_driver(config: EnrolmentConfig, *, tcti: str) -> Driver:
    """Open the driver of `enrolment.evidence`; blocking. The caller closes it.

    UsageError if the configured hardware doesn't exist here, UnavailableError if it doesn't answer.
    """
    module = _module(config)
    if module is None:
        kind = third_party_evidence.load(config.evidence)
        return cast("Driver", kind.open_driver(config.settings))
    return module.open_driver(config, tcti=tcti)


def check_driver(config: EnrolmentConfig) -> None:
    """Raise as `open_driver` would for a file that it can't use; no hardware is asked."""
    module = _module(config)
    if module is None:
        third_party_evidence.load(config.evidence)
    else:
        module.check(config)


def open_sources(config: EnrolmentConfig) -> Sequence[SecondarySource]:
    """Return the sources of `enrolment.secondary`."""
    return [source_of(each) for each in config.secondary]


def source_of(config: SecondaryEvidenceConfig) -> CardSource | CommandSource:
    """Return the source of one device's evidence."""
    if config.socket is not None:
        return CardSource(config.label, config.socket)
    return CommandSource(config)


def _module(config: EnrolmentConfig) -> _Module | None:
    name = EVIDENCE_DRIVERS.get(config.evidence)
    if name is None:
        return None
    return cast("_Module", importlib.import_module(f"sealane.daemon.node.evidence.{name}"))
