"""DPDK's crypto devices as cards: the driver that `make cryptodev` builds, and its arguments."""

import os
from collections.abc import Mapping, Sequence
from typing import Final

DRIVER: Final = os.environ.get("SEALANE_CRYPTODEV")
"""Path of the driver, if it was built."""

_EAL: Final = ("--no-huge", "--no-pci", "-m", "64")
_WORKERS: Final = ("crypto_aesni_gcm0", "crypto_aesni_gcm1")

CRYPTODEVS: Final[Mapping[str, Sequence[str]]] = {
    "crypto_aesni_gcm": ("--vdev=crypto_aesni_gcm",),
    "crypto_openssl": ("--vdev=crypto_openssl",),
    "crypto_scheduler": (
        *(f"--vdev={worker}" for worker in _WORKERS),
        ",".join(
            (
                "--vdev=crypto_scheduler",
                *(f"worker={worker}" for worker in _WORKERS),
                "mode=multi-core",
                "corelist=1",
            )
        ),
        "device=crypto_scheduler",
    ),
}
"""Arguments of the driver by what the card then is."""


def arguments(name: str) -> list[str]:
    """Return the arguments of `sealane-dpu` for one of them."""
    assert DRIVER, "SEALANE_CRYPTODEV names no driver"
    return [
        f"--driver={DRIVER}",
        *(f"--driver-argument={argument}" for argument in (*_EAL, *CRYPTODEVS[name])),
    ]
