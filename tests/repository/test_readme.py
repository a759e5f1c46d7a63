"""Checks of the README: its configuration loads, its names exist."""

import ast
import re
from pathlib import Path

import pytest

import sealane.client
from sealane.daemon.config import load_config

ROOT = Path(__file__).parents[2]


def block(language: str) -> str:
    """Return the README's only code block in a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(found)


def test_operators_configuration_loads(tmp_path: Path) -> None:
    path = tmp_path / "sealaned.toml"
    path.write_text(block("toml"))
    assert load_config(path).roles == ("target",)


def test_job_authors_lines_use_names_that_exist() -> None:
    code = "async def job():\n" + re.sub("^", "    ", block("python"), flags=re.MULTILINE)
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    for name in names & {"ErasureCoded"}:
        assert hasattr(sealane.client, name)
    assert names >= {"ErasureCoded"}


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_two_commands_are_targets(command: str) -> None:
    target = command.removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command in (ROOT / "README.md").read_text()
