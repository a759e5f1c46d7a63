"""Checks of the documents: links resolve, commands exist, examples load."""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealane.cli.ctl import COMMANDS, NOUNS, command_line
from sealane.daemon.runtime.sections import load_section
from sealane.lab.topology import Topology

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]


def anchors(document: Path) -> set[str]:
    """Return the fragments that links may use, as common viewers generate them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(document: Path) -> Iterator[tuple[Path, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            yield (document.parent / path if path else document), anchor


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for path, anchor in links(document):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


def shown(pattern: str) -> set[tuple[str, ...]]:
    """Return the matches of a pattern in code of the documents."""
    found: set[tuple[str, ...]] = set()
    for document in DOCUMENTS:
        for code in re.findall(r"```.*?```|`[^`]*`", document.read_text(), re.DOTALL):
            found |= set(re.findall(pattern, code))
    return found


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the subcommands of a parser."""
    with pytest.raises(SystemExit):
        parser.parse_args([])
    (found,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def examples() -> list[tuple[str, str]]:
    """Return every Python example by name, as the body of a coroutine."""
    found = []
    for document in DOCUMENTS:
        blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
        for number, code in enumerate(blocks):
            body = re.sub("^", "    ", code, flags=re.MULTILINE)
            found.append((f"{document.name}-{number}", f"async def example() -> None:\n{body}"))
    return found


BROUGHT = {
    "HOST_NQN": "str",
    "INIT": "str",
    "RANK": "int",
    "SIZE": "int",
    "TO_THE_OTHER_SITE": "dict[str, Any]",
    "far_address": "str",
    "far_node": "str",
    "far_socket": "str",
    "gradients": "np.ndarray[Any, Any]",
    "host_nqn": "str",
    "model_gradients": "torch.Tensor",
    "near_address": "str",
    "near_socket": "str",
    "other_socket": "str",
    "rank": "int",
    "secret_text": "str",
    "socket": "str",
    "subsystem_nqn": "str",
    "tensor_bytes": "bytes",
}
"""What a reader brings to the examples, and its type."""


def brought(code: str) -> Iterator[str]:
    """Declare the names that an example uses but doesn't bind."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    yield from (f"{name}: {BROUGHT[name]}" for name in ({n.id for n in names} - bound) & {*BROUGHT})


def test_python_examples_are_type_checked_whole(tmp_path: Path) -> None:
    head = ["from typing import Any", "import numpy as np", "import torch"]
    for name, code in examples():
        module = "\n".join([*head, *brought(code), code])
        (tmp_path / (re.sub(r"\W", "_", name) + ".py")).write_text(module)
    command = [sys.executable, "-m", "mypy", "--cache-dir", ".mypy_cache"]
    checked = subprocess.run(
        [*command, "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_example_hides_from_the_tests() -> None:
    hidden = re.compile(r"^    (?:async with|with|from|import) .*", re.MULTILINE)
    for document in DOCUMENTS:
        fenced = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        assert not hidden.findall(fenced), document


def test_commands_of_operators_exist() -> None:
    nouns = choices(command_line())
    verbs = {noun: choices(nouns[noun]) for noun in NOUNS}
    for noun, verb in shown(r"sealanectl (?:--socket \S+ )?([a-z]+) ([a-z]+(?:-[a-z]+)*)"):
        assert noun in nouns, noun
        assert noun in {"status", *COMMANDS} or verb in verbs[noun], f"{noun} {verb}"


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for words in shown(r"\bmake ((?:[a-z0-9-]+ ?)+)") for name in words.split()}
    assert named <= targets, named - targets


def test_topology_of_the_link_lab_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operate" / "lab.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "topology.toml"
    path.write_text(text)
    (wan,) = load_section(Topology, path).wan
    assert wan.name == "ocean"


@pytest.mark.parametrize("tool", ["errors", "metrics"])
def test_a_page_made_of_the_source_is_what_the_source_says(tool: str) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


SECURITY = (
    "understand/threat-model.md",
    "understand/attack-tests.md",
    "understand/channels.md",
    "understand/attestation.md",
    "understand/crash-consistency.md",
    "formats/secure-queue.md",
)
"""The documents of security, below docs/."""
TESTED = (
    "understand/threat-model.md",
    "understand/crash-consistency.md",
    "formats/secure-queue.md",
)
"""Those of which each section that says how the product behaves names its tests."""
NO_BEHAVIOUR = {"1. Words"}
TEST_NAME = re.compile(r"`(?:tests|native)/[^`]*`|`[\w/]*test_\w+\.py[^`]*`|`[\w/]+\.rs`")


def named_tests() -> set[str]:
    """Return the tests named in security documents: paths, and path::name."""
    found: set[str] = set()
    for name in SECURITY:
        for code in named_in((ROOT / "docs" / name).read_text()):
            found |= set(re.findall(r"(?:tests/[\w/]+/)?test_\w+\.py(?:::\w+)?", code))
    return found


def named_in(text: str) -> list[str]:
    """Return the texts in backticks."""
    return re.findall(r"`([^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def rust_sources() -> dict[Path, str]:
    """Return the Rust sources by their paths below the root."""
    paths = [path for path in (ROOT / "native").rglob("*.rs") if "target" not in path.parts[:-4]]
    return {path.relative_to(ROOT): path.read_text() for path in paths}


@pytest.mark.parametrize("name", sorted(named_tests()))
def test_tests_that_documents_name_exist(name: str) -> None:
    """A name may be the beginning of one (`test_9_…`)."""
    path, _, function = name.partition("::")
    files = [ROOT / path] if "/" in path else [*(ROOT / "tests").rglob(path)]
    assert any(f"def {function}" in file.read_text() for file in files if file.is_file())


def test_rust_tests_that_documents_name_exist() -> None:
    """A file may be named by the end of its path; a function by the beginning of its name."""
    sources = rust_sources()
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    code = "\n".join([*sources.values(), *tests])
    for document in SECURITY:
        for name in named_in((ROOT / "docs" / document).read_text()):
            if re.fullmatch(r"[\w/]+\.rs", name):
                found = any(f"/{path}".endswith(f"/{name}") for path in map(str, sources))
                assert found, f"{document}: {name}"
            # Six words in a row are the name of a test, not of a key.
            if re.fullmatch(r"(?:\w+::)+\w+…?|[a-z\d]+(?:_[a-z\d]+){5,}", name):
                function = name.rpartition("::")[2].rstrip("…")
                found = re.search(rf"\b(?:fn|mod|def|pub) {function}", code) is not None
                assert found, f"{document}: {name}"
            if name.startswith(("tests/", "native/")):
                assert (ROOT / name.partition("::")[0].rstrip("…")).exists(), f"{document}: {name}"


@pytest.mark.parametrize("document", TESTED)
def test_every_section_of_a_security_document_names_a_test(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    sections = re.split(r"^#{2,3} (.*)$", text, flags=re.MULTILINE)[1:]
    for head, body in zip(sections[::2], sections[1::2], strict=True):
        assert head in NO_BEHAVIOUR or TEST_NAME.search(body), f"{document}: {head}"


def test_every_attack_in_the_tables_names_a_test() -> None:
    text = (ROOT / "docs" / "understand" / "attack-tests.md").read_text()
    tables, _, _ = text.partition("\n## Mutants\n")
    for row in re.findall(r"^\| .*$", tables, re.MULTILINE):
        *_, tests, _ = row.split("|")
        assert "`" in tests or tests.strip() in {"tests", "---", "the worlds"}, row
