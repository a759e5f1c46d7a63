"""Rules about the source itself."""

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in (ROOT / "src" / "sealane").iterdir() if path.is_symlink())


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [path for line in listing.splitlines() if (path := ROOT / line).is_file()]


def test_farm_links_every_package() -> None:
    farm = ROOT / "src" / "sealane"
    links = {path.name: path.readlink() for path in farm.iterdir() if path.is_symlink()}
    assert links == {name: Path("../..") / name for name in PACKAGES}


def test_packages_are_never_imported_bare() -> None:
    bare = re.compile(rf"^\s*(from|import)\s+({'|'.join(PACKAGES)})\b", re.MULTILINE)
    offenders = [path for path in tracked("*.py") if bare.search(path.read_text())]
    assert offenders == []


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"\b(TODO|FIXME|XXX|HACK)\b", "an unfinished mark: finish it or write an issue"),
        (r"\bNotImplementedError\b|\btodo!\(|\bunimplemented!\(", "a stub"),
        (r"# type: ignore(?!\[)|# noqa(?!:)", "a blanket ignore hides the next fault"),
    ],
)
def test_sources_have_no_unfinished_places(pattern: str, why: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {why}"
        for path in tracked("*.py", "*.rs", "*.proto")
        if "_pb2" not in path.name and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_proto_forbids_unsafe_code() -> None:
    assert "#![forbid(unsafe_code)]" in (ROOT / "native/proto/src/lib.rs").read_text()
    assert "#![forbid(unsafe_code)]" in (ROOT / "native/sim/src/lib.rs").read_text()


@pytest.mark.parametrize(("crate", "file"), [("erasure", "kernels"), ("gcm", "kernel")])
def test_unsafe_code_of_a_kernel_is_in_one_file(crate: str, file: str) -> None:
    library = (ROOT / f"native/{crate}/src/lib.rs").read_text()
    assert "#![deny(unsafe_code)]" in library
    assert re.findall(r"#\[allow\(unsafe_code\)\]\nmod (\w+);", library) == [file]
    assert [
        path.name for path in tracked(f"native/{crate}/*.rs") if "unsafe {" in path.read_text()
    ] == [f"{file}.rs"]


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in tracked("*.md"):
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
        broken += [
            f"{path.relative_to(ROOT)}: {link}"
            for link in links
            if "://" not in link and not (path.parent / link).exists()
        ]
    assert broken == []


def test_generated_code_is_what_the_proto_files_say(tmp_path: Path) -> None:
    relative = sorted(f"sealane/{p.relative_to(ROOT)}" for p in tracked("protocol/*.proto"))
    bundled = str(Path(protoc.__file__).parent / "_proto")
    arguments = ["protoc", f"-I{ROOT / 'src'}", f"-I{bundled}"]
    for plugin in ("mypy", "mypy_grpc"):
        program = Path(sys.executable).parent / f"protoc-gen-{plugin}"
        arguments.append(f"--plugin=protoc-gen-{plugin}={program}")
    arguments += [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    arguments += [
        f"--mypy_out=quiet,readable_stubs:{tmp_path}",
        f"--mypy_grpc_out=quiet:{tmp_path}",
    ]
    assert protoc.main([*arguments, *relative]) == 0
    made = {path.relative_to(tmp_path / "sealane") for path in tmp_path.rglob("*.py*")}
    assert {path.suffix for path in made} == {".py", ".pyi"}
    for path in made:
        assert (tmp_path / "sealane" / path).read_text() == (ROOT / path).read_text(), path
    committed = {path.relative_to(ROOT) for path in tracked("protocol/*_pb2*")}
    assert committed == made, "code of a .proto file that is gone"


def test_the_synchronous_client_is_what_the_asynchronous_one_says() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools" / "synchronous", "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_call_is_written_in_few_files() -> None:
    files = {
        path: path.read_text()
        for path in tracked("*.py", "*.proto")
        if path.relative_to(ROOT).parts[0] in PACKAGES
        if "_pb2" not in path.name and path.name != "synchronous.py"
    }
    calls = {
        (service, method)
        for path in tracked("protocol/v1/*.proto")
        for service, body in re.findall(r"^service (\w+) {(.*?)^}", files[path], re.M | re.S)
        for method in re.findall(r"rpc (\w+)\(", body)
    }
    assert len(calls) > 60
    for service, method in calls:
        named = re.compile(rf"rpc {method}\(|def {method}\(|\.{method}\(|/{service}/{method}\"")
        # .proto, table of roles, servicer, callers; the service and a verb have names of their own.
        found = [str(path.relative_to(ROOT)) for path, text in files.items() if named.search(text)]
        assert len(found) <= 4, (service, method, found)


def test_nothing_cites_a_document_that_readers_do_not_have() -> None:
    cited = re.compile(r"\bDESIGN( section|,)? ?§")
    found = [
        path.relative_to(ROOT)
        for path in tracked("*.py", "*.rs", "*.proto", "*.pyi", "*.md", "*.toml")
        if path != Path(__file__)
        if cited.search(path.read_text())
    ]
    assert found == []


def test_every_mutant_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = importlib.machinery.SourceFileLoader("mutants", str(ROOT / "tools" / "mutants"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    mutants = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, mutants)
    loader.exec_module(mutants)
    assert mutants.read_table()
    assert not mutants.is_there("tests/repository/test_tidy.py::test_that_is_gone", "")
    assert not mutants.is_there("store::tests::that_is_gone", "fn another")
