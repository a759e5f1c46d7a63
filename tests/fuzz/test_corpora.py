"""Runs every committed input, including past findings, through its fuzz target."""

from pathlib import Path

import pytest

from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_holds(target: str) -> None:
    inputs = [path for path in INPUTS if path.parent.name == target]
    assert inputs
    for path in inputs:
        try:
            TARGETS[target](path.read_bytes())
        except Exception as error:
            error.add_note(f"input: {path}")
            raise


def test_every_corpus_has_its_target() -> None:
    assert {path.parent.name for path in INPUTS} == set(TARGETS)
