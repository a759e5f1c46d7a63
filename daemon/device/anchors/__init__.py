"""Anchors: the small memory that an adversary can't roll back (docs/understand/anchors.md)."""
