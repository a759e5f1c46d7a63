"""Words of the protocol that messages carry as strings."""

from enum import StrEnum


class VolumeMode(StrEnum):
    """Who keeps a volume fresh (docs/understand/threat-model.md). Empty in a descriptor: remote."""

    REMOTE = "remote"
    """The target, which is Sealane's."""
    LOCAL = "local"
    """The gateway, of a volume on a third party's target."""
    OFF = "off"
    """Nobody: an older sector is not noticed."""


class Freshness(StrEnum):
    """How a store keeps its volume fresh."""

    TREE = "tree"
    """By an integrity tree, whose root is anchored."""
    OWN_MEMORY = "own memory"
    """The store is memory of the target, so it can't be rolled back."""
    NONE = "none"
