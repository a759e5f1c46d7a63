"""Assemble a small Linux guest out of Debian packages, for `run-guest` to boot.

The packages are downloaded and unpacked into the given directory; none is installed. The result is
a kernel, a small initramfs that mounts the root disk, and a root disk image with the other modules
and the tools. A second call with the same options returns at once, unless
--force is given.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernel_lab import layout
from kernel_lab.architecture import AMD64, ARCHITECTURES, Architecture, architecture
from kernel_lab.kernel import GuestRoot, Modules
from kernel_lab.layout import LabError
from kernel_lab.packages import Apt, unpack

HERE = Path(__file__).resolve().parent

PACKAGES = (
    # platform
    *("busybox-static", "bash", "coreutils", "util-linux", "findutils", "grep", "sed", "mawk"),
    *("procps", "kmod", "tar", "zstd", "python3"),
    # block devices, file systems
    *("e2fsprogs", "xfsprogs", "fio", "nvme-cli", "dmsetup"),
    # network
    *("iproute2", "nftables", "socat", "tcpdump"),
    # RDMA
    *("ibverbs-providers", "libibverbs1", "ibverbs-utils"),
)

# Modules for the root disk, as prefixes or patterns of their path below kernel/,
# with everything that they depend on; and the processor's ciphers.
MODULES = (
    *("crypto/", "lib/", "security/keys/"),
    *("drivers/block/", "drivers/md/", "drivers/nvme/", "drivers/virtio/"),
    *("drivers/infiniband/core/", "drivers/infiniband/sw/rxe/"),
    *("drivers/char/hw_random/virtio*", "drivers/char/virtio_console*"),
    *("drivers/net/virtio_net*", "drivers/net/veth*", "drivers/net/ifb*"),
    *("fs/ext4/", "fs/xfs/", "fs/configfs/", "fs/nls/nls_utf8*", "fs/nls/nls_ascii*"),
    *("net/core/", "net/handshake/", "net/ipv4/", "net/netfilter/", "net/packet/", "net/sched/"),
    *("net/tls/", "net/unix/"),
)

# Modules that the initramfs loads before it mounts the root disk; some kernels
# have some of them built in.
INITRAMFS_MODULES = ("virtio_pci", "virtio_blk", "ext4", "crc32c_generic")

# The busybox commands that the initramfs uses.
INITRAMFS_APPLETS = (
    *("cat", "cp", "insmod", "mkdir", "mount", "poweroff", "seq", "sh", "sleep", "switch_root"),
    "umount",
)

# Left out of the root disk.
UNWANTED = (
    *(f"./usr/share/{name}/*" for name in ("doc", "man", "locale", "info", "lintian", "bug")),
    *(f"./usr/share/{name}/*" for name in ("bash-completion", "zsh", "icons", "gcc", "gdb")),
    *("./usr/lib/systemd/*", "./lib/systemd/*", "./usr/share/perl/*", "./usr/lib/*/perl/*"),
)

# The guest's host identifier, which is also part of its NQN.
HOST_ID = "6b1e5c7e-0000-4000-8000-000000000001"
HOST_NQN = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"

_ROOT_DIRECTORIES = ("dev", "proc", "sys", "run", "tmp", "job", "out", "root", "mnt", "etc")
_ROOMY_BYTES = 2 << 30


def write_initramfs(path: Path, root: Path, modules: Modules) -> None:
    """Write the initramfs, which mounts the root disk."""
    order = modules.with_dependencies(INITRAMFS_MODULES)
    with path.open("wb") as stream:
        archive = layout.Cpio(stream)
        for name in ("dev", "proc", "sys", "job"):
            archive.directory(name)
        # The first process writes to these until /dev is mounted.
        archive.character_device("dev/console", 5, 1)
        archive.character_device("dev/null", 1, 3)
        archive.tree(root / "usr/bin/busybox", "bin/busybox")
        for applet in INITRAMFS_APPLETS:
            archive.symlink(f"bin/{applet}", "busybox")
        archive.tree(HERE / "rootfs/init", "init")
        for name in order:
            archive.file(f"modules/{name}.ko", modules.data(name))
        archive.file("modules/order", "".join(f"{name}.ko\n" for name in order).encode())
        archive.close()


def populate_root(guest: GuestRoot, release: str, modules: Modules, crypto: str) -> None:
    """Add what a bootable root file system needs in addition to the packages."""
    root = guest.path
    for name in _ROOT_DIRECTORIES:
        (root / name).mkdir(exist_ok=True)
    for name in ("start", "lab-ready"):
        place = root / "usr/lib/lab" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "rootfs" / name, place)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n10.0.2.2 host\n")
    (root / "etc/mtab").unlink(missing_ok=True)
    (root / "etc/mtab").symlink_to("/proc/self/mounts")
    (root / "etc/nvme").mkdir(exist_ok=True)
    (root / "etc/nvme/hostid").write_text(f"{HOST_ID}\n")
    (root / "etc/nvme/hostnqn").write_text(f"{HOST_NQN}\n")
    for link, target in (("bin/sh", "bash"), ("bin/awk", "mawk")):
        (root / "usr" / link).unlink(missing_ok=True)
        (root / "usr" / link).symlink_to(target)
    # Busybox provides commands that no unpacked package has.
    busybox = guest.runner.command(root, "usr/bin/busybox")
    listing = subprocess.run([*busybox, "--list"], check=True, capture_output=True, text=True)
    for applet in listing.stdout.split():
        if not any((root / "usr" / place / applet).exists() for place in ("bin", "sbin")):
            (root / "usr/bin" / applet).symlink_to("busybox")

    directory = root / "usr/lib/modules" / release
    for name in modules.with_dependencies(modules.matching((crypto, *MODULES))):
        place = directory / modules.place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(modules.data(name))
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copy(modules.directory / name, directory)
    guest.run("usr/bin/kmod", "-b", root, release, called="depmod")


def write_root_image(path: Path, guest: GuestRoot) -> None:
    """Write the ext4 image of the root disk, with some free space."""
    root = guest.path
    used = sum(file.lstat().st_blocks * 512 for file in root.rglob("*"))
    size = used * 5 // 4 // 2**20 + 128
    path.unlink(missing_ok=True)
    options = ("-q", "-F", "-t", "ext4", "-L", "lab-root", "-m", "0", "-O", "^has_journal")
    guest.run(
        "usr/sbin/mke2fs",
        *(*options, "-E", "root_owner=0:0", "-d", root, path, f"{size}M"),
        MKE2FS_CONFIG=str(root / "etc/mke2fs.conf"),
    )


def work_directory(cache: Path) -> "tempfile.TemporaryDirectory[str]":
    """Yield a directory for thousands of unpacked files, in memory if there is room."""
    memory = Path("/dev/shm")  # noqa: S108  # the directory made in it has a name of its own
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > _ROOMY_BYTES
    return tempfile.TemporaryDirectory(prefix="kernel-lab-", dir=memory if roomy else cache)


def build(
    cache: Path, arch: Architecture, kernel: str | None, packages: list[str], work: Path
) -> dict[str, str]:
    """Build the guest's files in `cache`; return the manifest."""
    apt = Apt(cache / "apt", arch.name)
    apt.update()
    offered = [(name, apt.dependencies(name)) for name in ([kernel] if kernel else arch.kernels)]
    found = [(name, needed) for name, needed in offered if needed is not None]
    if not found:
        raise LabError("none of the configured Debian sources offers the kernel package")
    name, needed = found[0]
    # A package such as linux-image-amd64 only depends on the one with the kernel.
    name = next((package for package in needed if package.startswith("linux-image-")), name)

    root, unpacked = work / "root", work / "kernel"
    # Older packages install below /bin and /lib, which are links on a current system.
    for place in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / place).mkdir(parents=True)
        (root / place).symlink_to(f"usr/{place}")
    for archive in apt.download_with_dependencies(packages):
        unpack(archive, root, UNWANTED)
    unpack(apt.download(name), unpacked)

    [image] = unpacked.glob("boot/vmlinuz-*")
    release = image.name.removeprefix("vmlinuz-")
    guest = GuestRoot(root, arch.runner)
    modules = Modules(guest, next(unpacked.glob(f"**/modules/{release}")))
    data = image.read_bytes()
    (cache / layout.KERNEL).write_bytes(data)
    (cache / layout.DIRECT_KERNEL).unlink(missing_ok=True)
    if direct := arch.direct_kernel(guest, data):
        (cache / layout.DIRECT_KERNEL).write_bytes(direct)
    write_initramfs(cache / layout.INITRAMFS, root, modules)
    populate_root(guest, release, modules, arch.crypto)
    write_root_image(cache / layout.ROOT_IMAGE, guest)
    return {"kernel": release, "package": name, layout.ARCHITECTURE: arch.name}


def recipe_of(arch: Architecture, kernel: str | None, packages: list[str]) -> str:
    """Return a digest of all inputs of the build."""
    recipe = hashlib.sha256(repr((arch.name, kernel, packages)).encode())
    modules = ("architecture.py", "build.py", "kernel.py", "layout.py", "packages.py")
    for source in (*(HERE / name for name in modules), *sorted((HERE / "rootfs").iterdir())):
        recipe.update(source.read_bytes())
    return recipe.hexdigest()


def main() -> int:
    """Build the guest unless it exists."""
    parser = argparse.ArgumentParser(prog="build-guest", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("cache", type=Path, help="directory for the guest and what it is made of")
    add("--arch", default=AMD64.name, metavar="NAME", help=f"one of {', '.join(ARCHITECTURES)}")
    add("--kernel", help="kernel package (by default the newest that Debian has)")
    add("--package", action="append", default=[], help="another package for it (repeatable)")
    add("--force", action="store_true", help="build even if the guest is there already")
    options = parser.parse_args()

    cache = options.cache.resolve()
    packages = sorted({*PACKAGES, *options.package})
    arch = architecture(options.arch)
    recipe = recipe_of(arch, options.kernel, packages)
    manifest = layout.read_manifest(cache)
    if manifest and manifest["recipe"] == recipe and not options.force:
        print(f"{manifest['kernel']}: already built")
        return 0

    (cache / layout.MANIFEST).unlink(missing_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    with work_directory(cache) as work:
        made = build(cache, arch, options.kernel, packages, Path(work))
    content = json.dumps({**made, "recipe": recipe}, indent=2)
    (cache / layout.MANIFEST).write_text(content + "\n")
    print(f"{made['kernel']}: built")
    return 0


if __name__ == "__main__":
    layout.main(main)
