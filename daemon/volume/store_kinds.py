"""Kinds of stores, as the control plane needs to know them: one row each.

The engine's half of a kind is a `BlockStore` (`native/engine/src/storage/stores`) and its arms in
`selection.rs` there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sealane.protocol.kinds import StoreKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTraits:
    """Traits of a kind; the engine knows how it stores."""

    is_kept: bool = False
    """It outlives the process: a path leads to its file or its drive."""
    lies_on_namespaces: bool = False
    """It takes a whole namespace of a drive."""
    imitates_drive: bool = False
    """It is memory at the pace of a named drive."""
    needs_metadata: bool = False
    """As a plain namespace it has metadata beside each block."""
    needs_secret_in_mode_off: bool = False
    """Its layout is authenticated, even of a volume without freshness."""

    def takes_secret(self, *, freshness: bool) -> bool:
        """Return whether a sealed volume on it has a secret of its device, and an anchor."""
        return self.is_kept and (freshness or self.needs_secret_in_mode_off)


STORE_KINDS: Final[Mapping[StoreKind, StoreTraits]] = {
    StoreKind.EMULATED: StoreTraits(imitates_drive=True),
    StoreKind.FILE: StoreTraits(is_kept=True, needs_secret_in_mode_off=True),
    StoreKind.INLINE: StoreTraits(is_kept=True, needs_metadata=True),
    StoreKind.MEMORY: StoreTraits(),
    StoreKind.NVME: StoreTraits(is_kept=True, lies_on_namespaces=True),
}


def only_with(what: str, has: Callable[[StoreTraits], bool]) -> str:
    """Return the rule that `what` goes with the kinds for which `has` is true, for an error."""
    names = [f'"{name}"' for name, kind in STORE_KINDS.items() if has(kind)]
    listed = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"{what} if store is {listed}, and only then"
