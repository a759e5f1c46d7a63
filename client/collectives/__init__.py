"""Collective operations of 2 to 64 sites over sessions: a ring of jobs (docs/collectives.md)."""

from sealane.client.collectives.group import Group, Member, Route, join
from sealane.client.collectives.reduction import Operator

__all__ = ["Group", "Member", "Operator", "Route", "join"]
