"""Anchors: small storage that an adversary can't roll back (docs/understand/anchors.md)."""
