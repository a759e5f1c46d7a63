"""Debian packages, downloaded and unpacked below a directory; none is installed."""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kernel_lab.layout import LabError


class Apt:
    """apt-get with its own state: it uses the configured sources and sees no installed packages."""

    def __init__(self, directory: Path, architecture: str) -> None:
        self._directory = directory
        for name in ("lists/partial", "cache/archives/partial"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / "status").touch()
        settings: dict[str, object] = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "Dir::State": directory,
            "Dir::State::lists": directory / "lists",
            "Dir::State::status": directory / "status",
            "Dir::Cache": directory / "cache",
            "APT::Keep-Downloaded-Packages": "true",
            "APT::Install-Recommends": "false",
            "APT::Update::Post-Invoke": "",
            "APT::Update::Post-Invoke-Success": "",
            "Debug::NoLocking": "true",
        }
        if os.getuid() == 0:
            settings["APT::Sandbox::User"] = "root"
        self._options = [f"-o{key}={value}" for key, value in settings.items()]

    def _run(self, command: str, *arguments: str, directory: Path | None = None) -> str:
        result = subprocess.run(
            [command, "-q", *self._options, *arguments],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise LabError(f"{command} {arguments[0]} failed: {result.stderr.strip()}")
        return result.stdout

    def update(self) -> None:
        """Fetch the lists of the configured sources."""
        self._run("apt-get", "update")

    def dependencies(self, package: str) -> list[str] | None:
        """Return the dependencies of a package; None if no source offers it."""
        try:
            listing = self._run("apt-cache", "depends", package)
        except LabError:
            return None
        return re.findall(r"Depends: (\S+)", listing)

    def download_with_dependencies(self, packages: Iterable[str]) -> list[Path]:
        """Download packages and all they depend on; return the paths of the archives."""
        self._run("apt-get", "install", "--download-only", "--yes", *packages)
        # Lines such as: Inst libc6 (2.36-9 Debian:12/stable [amd64])
        plan = self._run("apt-get", "install", "--simulate", *packages)
        chosen = re.findall(r"^Inst (\S+) \((\S+) .*\[(\w+)\]\)", plan, re.MULTILINE)
        return [
            self._directory
            / "cache/archives"
            / f"{name}_{version.replace(':', '%3a')}_{machine}.deb"
            for name, version, machine in chosen
        ]

    def download(self, package: str) -> Path:
        """Download one package without its dependencies; return the archive's path."""
        directory = self._directory / "single"
        directory.mkdir(exist_ok=True)
        for old in directory.glob(f"{package}_*.deb"):
            old.unlink()
        self._run("apt-get", "download", package, directory=directory)
        return next(directory.glob(f"{package}_*.deb"))


def unpack(archive: Path, directory: Path, unwanted: Iterable[str] = ()) -> None:
    """Unpack a Debian package below a directory, without running its scripts."""
    directory.mkdir(parents=True, exist_ok=True)
    contents = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE)
    excluded = [f"--exclude={pattern}" for pattern in unwanted]
    subprocess.run(
        [
            "tar",
            "-C",
            directory,
            "--keep-directory-symlink",
            "--no-same-owner",
            *excluded,
            "-xf",
            "-",
        ],
        stdin=contents.stdout,
        check=True,
    )
    if contents.wait() != 0:
        raise LabError(f"cannot unpack {archive}")
