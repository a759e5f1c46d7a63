"""Sealane: attested NVMe-oF volumes and inter-datacenter sessions."""

from sealane._native import __version__

__all__ = ["__version__"]
