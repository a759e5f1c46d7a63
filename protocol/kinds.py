"""Enumerations that protocol messages carry as strings."""

from enum import StrEnum


class VolumeMode(StrEnum):
    """Which side keeps a volume fresh (threat-model.md). Empty in a descriptor: remote."""

    REMOTE = "remote"
    """The target, which is a Sealane target."""
    LOCAL = "local"
    """The gateway, for a volume on a third party's target."""
    OFF = "off"
    """None: an older sector is not detected."""


class Freshness(StrEnum):
    """How a store keeps its volume fresh."""

    TREE = "tree"
    """An integrity tree with an anchored root."""
    OWN_MEMORY = "own memory"
    """The store is in the target's memory, so it can't be rolled back."""
    NONE = "none"
