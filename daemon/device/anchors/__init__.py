"""Anchors: the small memory that an adversary can't roll back (DESIGN §5.5, docs/anchors.md)."""
