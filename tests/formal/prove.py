"""Prove the protocols in `tests/formal/*.pv` with ProVerif, in each scenario of `scenarios.toml`.

`python tests/formal/prove.py` prints a row for every query; it ends with 1 if one comes out
otherwise than the scenario says, with 2 if there is no ProVerif.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARIES = ("primitives", "trust")
SCENARIO_SECONDS = 120
NO_PROVER = "no proverif on PATH, and PROVERIF names none: opam install proverif"

_SWITCH = re.compile(r"\b(?:steal|skip)_[a-z_]+\b")
_NAME = re.compile(r"\(\* ((?:C\d|reached)\.[a-z-]+):.*?\*\)", re.DOTALL)
_RESULT = re.compile(r"^RESULT .* (is true|is false|cannot be proved)\.$", re.MULTILINE)


@dataclass(frozen=True)
class Scenario:
    """A model, what is stolen or left out in it, and the queries that then aren't proved."""

    model: str
    switches: frozenset[str] = frozenset()
    fails: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The model and its switches."""
        return " ".join([self.model, *sorted(self.switches)])


@dataclass(frozen=True)
class Finding:
    """What ProVerif says of one query: proved, attack, reached or unknown, and what is wanted."""

    query: str
    found: str
    wanted: frozenset[str]

    @property
    def is_wanted(self) -> bool:
        """Whether the scenario expects this."""
        return self.found in self.wanted


class ModelError(Exception):
    """A model, or the table of scenarios, that doesn't fit."""


def prover() -> str | None:
    """Return the program, from PROVERIF or PATH."""
    return os.environ.get("PROVERIF") or shutil.which("proverif")


def scenarios() -> list[Scenario]:
    """Read the table."""
    table = tomllib.loads((FOLDER / "scenarios.toml").read_text())
    return [
        Scenario(row["model"], frozenset(row.get("with", ())), frozenset(row.get("fails", ())))
        for row in table["scenario"]
    ]


def queries(model: str) -> list[str]:
    """Return the names of a model's queries, in order."""
    text = (FOLDER / f"{model}.pv").read_text()
    names = _NAME.findall(text)
    if len(names) != len(re.findall(r"^query ", text, re.MULTILINE)) or len({*names}) != len(names):
        raise ModelError(f"{model}.pv: each query needs a name of its own in the comment above it")
    return names


def prove(scenario: Scenario, program: str) -> list[Finding]:
    """Run one scenario; ModelError if it can't be run."""
    names = queries(scenario.model)
    libraries = [FOLDER / "lib" / f"{each}.pvl" for each in LIBRARIES]
    model = FOLDER / f"{scenario.model}.pv"
    known = {s for path in (*libraries, model) for s in _SWITCH.findall(path.read_text())}
    if stray := scenario.switches - known | scenario.fails - {*names}:
        raise ModelError(f"{scenario.name}: the model has no {', '.join(sorted(stray))}")
    with tempfile.NamedTemporaryFile("w", suffix=".pvl") as switches:
        for switch in sorted(known):
            switches.write(f"letfun {switch} = {str(switch in scenario.switches).lower()}.\n")
        switches.flush()
        arguments = [part for path in (switches.name, *libraries) for part in ("-lib", str(path))]
        try:
            ran = subprocess.run(
                [program, *arguments, str(model)],
                capture_output=True,
                text=True,
                check=False,
                timeout=SCENARIO_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"{scenario.name}: no result in {SCENARIO_SECONDS} s") from error
    results = _RESULT.findall(ran.stdout)
    if ran.returncode or len(results) != len(names):
        raise ModelError(f"{scenario.name}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    words = {"is true": "proved", "is false": "attack", "cannot be proved": "unknown"}
    return [
        Finding(name, _found(name, words[result]), _wanted(name, scenario))
        for name, result in zip(names, results, strict=True)
    ]


def _found(name: str, result: str) -> str:
    # Reachability is asked as "this event never happens".
    return "reached" if name.startswith("reached.") and result == "attack" else result


def _wanted(name: str, scenario: Scenario) -> frozenset[str]:
    if name.startswith("reached."):
        return frozenset({"reached"})
    return frozenset({"attack", "unknown"} if name in scenario.fails else {"proved"})


def main() -> int:
    """Prove all, print a table."""
    program = prover()
    if program is None:
        print(NO_PROVER)
        return 2
    wrong = 0
    began = time.monotonic()
    rows = scenarios()
    for scenario in rows:
        started = time.monotonic()
        findings = prove(scenario, program)
        print(f"{scenario.name}  ({time.monotonic() - started:.1f} s)")
        for each in findings:
            wrong += not each.is_wanted
            print(f"  {each.query:22} {each.found}{'' if each.is_wanted else '  NOT AS EXPECTED'}")
    print(f"{len(rows)} scenarios in {time.monotonic() - began:.0f} s, {wrong} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
