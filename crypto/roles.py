"""The roles that a daemon can run. Certificates and calls name them by these words."""

from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What a daemon does for others (docs/glossary.md)."""

    BROKER = "broker"
    TARGET = "target"
    GATEWAY = "gateway"
    FABRIC = "fabric"


NODE_ROLES: Final = (Role.TARGET, Role.GATEWAY, Role.FABRIC)
"""Those that attest to a broker."""
