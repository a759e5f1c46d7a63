"""Reason ids: one table, and whatever is raised is in it, and whatever is in it is raised."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from sealane.daemon.config import Config
from sealane.errors import foreign_reason

ROOT = Path(__file__).parents[2]
TABLE: dict[str, str | dict[str, str]] = tomllib.loads((ROOT / "tools/reasons.toml").read_text())
IDS = {reason for reason in TABLE if "…" not in reason}
FORM = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
SENTENCE_CHARACTERS_MAX = 200


def python_files() -> Iterator[Path]:
    source = ROOT / "src" / "sealane"
    for package in (path.readlink().name for path in source.iterdir() if path.is_symlink()):
        yield from (p for p in (ROOT / package).rglob("*.py") if "_pb2" not in p.name)
    yield source / "errors.py"


def python_ids(tree: ast.Module) -> Iterator[str]:
    """Literals that may be ids; one that something is only compared with isn't raised there."""
    compared = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for part in (node.left, *node.comparators)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in compared and FORM.fullmatch(node.value):
            yield node.value


def rust_ids() -> Iterator[str]:
    for path in sorted((ROOT / "native").rglob("src/**/*.rs")):
        if "tests" in path.stem or "tests" in path.parts:
            continue
        code = path.read_text().partition("#[cfg(test)]")[0]
        code = re.sub(r"^\s*//.*$|#\[pyclass\(.*\)\]", "", code, flags=re.MULTILINE)
        yield from (text for text in re.findall(r'"([^"\n]*)"', code) if FORM.fullmatch(text))


def test_every_id_of_the_table_is_raised() -> None:
    trees = [ast.parse(path.read_text()) for path in python_files()]
    raised = {reason for tree in trees for reason in python_ids(tree)} | {*rust_ids()}
    assert {*IDS} - raised == set()


def test_every_id_of_the_engine_is_in_the_table() -> None:
    assert {*rust_ids()} - IDS - {"sealane._native"} == set()


def test_every_entry_is_one_sentence() -> None:
    for reason, entry in TABLE.items():
        text = entry if isinstance(entry, str) else entry["do"]
        assert text[0].isupper(), reason
        assert text.endswith("."), reason
        assert len(text) <= SENTENCE_CHARACTERS_MAX, reason


def is_key(name: str) -> bool:
    """Return whether a configuration file can have a key of that name."""
    models: list[type[BaseModel]] = [Config]
    for part in name.split("."):
        found = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        if not found:
            return False
        models = [each for annotation in found for each in models_in(annotation)]
    return True


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def test_keys_that_the_table_names_exist() -> None:
    keys = re.compile(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z0-9_.]+)")
    named = {key for entry in TABLE.values() for key in keys.findall(str(entry))}
    assert named
    assert {key for key in named if not is_key(key)} == set()


def test_the_table_is_in_order() -> None:
    assert [*TABLE] == sorted(TABLE)


def test_python_refuses_an_unknown_id_where_it_is_raised(tmp_path: Path) -> None:
    module = tmp_path / "raises.py"
    module.write_text(
        "from sealane.errors import UsageError\n"
        'UsageError("volume.size", "an id of the table")\n'
        'UsageError("volume.seize", "none")\n'
        "def error(reason: str) -> UsageError:\n"
        '    return UsageError(reason, "any text")\n'
    )
    command = [sys.executable, "-m", "mypy", "--cache-dir", ".mypy_cache"]
    checked = subprocess.run(
        [*command, "--config-file", "pyproject.toml", str(module)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    lines = re.findall(r"raises\.py:(\d+): error: Argument 1", checked.stdout)
    assert lines == ["3", "5"], checked.stdout + checked.stderr


def test_only_texts_from_elsewhere_are_foreign_reasons() -> None:
    """Neither is the type made beside its one maker, nor is a literal passed off as foreign."""
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "ForeignReason":
                    assert path.name == "errors.py", path
                if node.func.id == "foreign_reason":
                    assert not isinstance(node.args[0], ast.Constant), path


@pytest.mark.parametrize("text", ["", "no words", "UPPER.case", "a" * 33 + ".b", "a.b\n"])
def test_what_cannot_be_an_id_is_no_reason(text: str) -> None:
    assert foreign_reason(text) == "peer.reason.malformed"


def test_a_newer_peer_may_give_a_reason_that_is_unknown_here() -> None:
    assert foreign_reason("volume.thing.of_tomorrow") == "volume.thing.of_tomorrow"
