"""Collective operations of 2 to 64 sites, a ring of jobs over sessions (collectives.md)."""

from sealane.client.collectives.group import Group, join
from sealane.client.collectives.reduction import Operator
from sealane.client.collectives.sessions import Member, Route

__all__ = ["Group", "Member", "Operator", "Route", "join"]
