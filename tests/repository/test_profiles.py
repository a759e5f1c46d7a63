"""Build settings of the shipped engine."""

import tomllib
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"
SHIPPED = ("sealane-proto", "sealane-engine", "sealane-py")
"""Crates whose arithmetic is on numbers that peers send. Those of ciphers and codes wrap on purpose
or index tables that they made."""


def test_the_shipped_engine_stops_at_an_overflow_instead_of_going_on_with_a_wrong_number() -> None:
    release = tomllib.loads((NATIVE / "Cargo.toml").read_text())["profile"]["release"]
    packages = release["package"]
    assert {name for name in SHIPPED if packages[name].get("overflow-checks") is True} == {*SHIPPED}
