"""The glossary has the project's own words, and no others.

Two nets. `coined_terms.txt` is kept by hand: it holds what only a reader can tell to be coined, so
that an entry doesn't leave the glossary alone. The words of public class names are found
automatically: each that is common there and in the documents is in the glossary or, for all to see,
in `ordinary_words.txt`. A coined word that is in no class name and that nobody lists is not caught.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
CLASSES_MIN = 3
"""Public classes with a word in their names, from which on it is the project's word."""
USES_MIN = 4
"""Uses in the documents, from which on a reader meets it."""
PLURALS = ("", "s", "es")


def listed(name: str) -> list[str]:
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def entries() -> list[str]:
    """Terms of the glossary; one row may have several, with commas between."""
    rows = re.findall(r"^\| (?:\*\*)?([^|*]+?)(?:\*\*)? \|", GLOSSARY.read_text(), re.MULTILINE)
    return [term for row in rows for term in row.split(", ") if term != "word"]


def sources() -> Iterator[Path]:
    source = ROOT / "src" / "sealane"
    for package in (path.readlink().name for path in source.iterdir() if path.is_symlink()):
        yield from (p for p in (ROOT / package).rglob("*.py") if "_pb2" not in p.name)


def documents() -> list[Path]:
    return [p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if p != GLOSSARY]


def class_words() -> Counter[str]:
    """Count the public classes that have each word in their names."""
    words: Counter[str] = Counter()
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                words.update({w.lower() for w in re.findall(r"[A-Z][a-z]+", node.name)})
    return words


def prose_words() -> Counter[str]:
    """Count the words of the documents, code left out."""
    text = "\n".join(path.read_text() for path in documents())
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return Counter(re.findall(r"[a-z]+", prose.lower()))


def test_coined_terms_are_in_the_glossary() -> None:
    assert {*listed("coined_terms.txt")} - {*entries()} == set()


def test_the_projects_words_are_in_the_glossary() -> None:
    prose = prose_words()
    known = {word for term in entries() for word in re.findall(r"[a-z]+", term.lower())}
    known |= {*listed("ordinary_words.txt")}
    common = {
        word
        for word, classes in class_words().items()
        if classes >= CLASSES_MIN and sum(prose[word + s] for s in PLURALS) >= USES_MIN
    }
    missing = {word for word in common if not any(word in {k, k + "s", k + "es"} for k in known)}
    assert missing == set(), "explain these in docs/glossary.md, or call them ordinary"


def test_words_are_called_ordinary_only_where_that_is_needed() -> None:
    assert {*listed("ordinary_words.txt")} - {*class_words()} == set()


def test_every_entry_is_used() -> None:
    texts = [path.read_text() for path in (*documents(), *sources())]
    texts += [path.read_text() for path in (ROOT / "native").glob("*/src/**/*.rs")]
    text = re.sub(r"[\s#/_]+", " ", " ".join(texts)).lower()
    assert [term for term in entries() if term.lower() not in text] == []


def test_entries_are_in_order_behind_the_four_roles() -> None:
    terms = [term.lower() for term in entries()]
    assert terms[:4] == ["broker", "target", "gateway", "fabric"]
    assert terms[4:] == sorted(terms[4:])
