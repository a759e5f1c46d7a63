"""Processors of guests: where Debian's packages and QEMU differ."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from kernel_lab.kernel import GuestRoot, Runner, decompressed, uncompressed_kernel
from kernel_lab.layout import LabError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A processor that guests may have."""

    name: str
    """Debian's name for it."""
    triple: str
    """Directory of its libraries, below /usr/lib."""
    kernels: tuple[str, ...]
    """Kernel packages; the first one that the configured Debian sources offer is taken."""
    crypto: str
    """Directory of the kernel's ciphers for it, below kernel/ of the modules."""
    runner: Runner
    """Runs the guest's own programs here."""
    direct_kernel: Callable[[GuestRoot, bytes], bytes | None]
    """Returns what QEMU starts instead of the package's image; None if that can be started."""
    qemu: str
    machine: tuple[str, ...]
    kernel_options: tuple[str, ...]


def arm_kernel(root: GuestRoot, image: bytes) -> bytes | None:
    """Extract the kernel from an EFI program that decompresses it, which QEMU doesn't start.

    Returns None if the image is no such program.
    """
    if image[4:8] != b"zimg":
        return None
    offset, length = struct.unpack_from("<II", image, 8)
    return decompressed(root, image[offset : offset + length])


AMD64 = Architecture(
    name="amd64",
    triple="x86_64-linux-gnu",
    kernels=("linux-image-6.12-amd64", "linux-image-amd64"),
    crypto="arch/x86/crypto/",
    runner=Runner(loader="lib64/ld-linux-x86-64.so.2", library="usr/lib/x86_64-linux-gnu"),
    direct_kernel=uncompressed_kernel,
    qemu="qemu-system-x86_64",
    machine=("-machine", "q35", "-cpu", "max"),
    # The kernel calibrates its counter with timing loops. On a busy machine they are interrupted;
    # the clock then runs several times too fast and keep-alives expire. The HPET's rate is fixed.
    kernel_options=(
        *("clocksource=hpet", "console=ttyS0", "tsc=reliable", "no_timer_check", "edd=off"),
        "8250.nr_uarts=1",
    ),
)
ARM64 = Architecture(
    name="arm64",
    triple="aarch64-linux-gnu",
    kernels=("linux-image-6.12-arm64", "linux-image-arm64"),
    crypto="arch/arm64/crypto/",
    runner=Runner(emulator="qemu-aarch64"),
    direct_kernel=arm_kernel,
    qemu="qemu-system-aarch64",
    # A processor of a card's kind: AES and PMULL, no SVE, and no pointer authentication, which is
    # slow to emulate.
    machine=("-machine", "virt,gic-version=3", "-cpu", "neoverse-n1"),
    kernel_options=("console=ttyAMA0",),
)
ARCHITECTURES = {each.name: each for each in (AMD64, ARM64)}


def architecture(name: str) -> Architecture:
    """Return an architecture by Debian's name; LabError if there are no such guests."""
    if name not in ARCHITECTURES:
        raise LabError(f"--arch {name}: allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
