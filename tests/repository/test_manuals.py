"""Manual pages and shell completions, made from the parsers and the page on configuration."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sealane.cli.ctl import COMMANDS, NOUNS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate" / "configuration.md"
MACROS = re.compile(r"\\f.|\\[,/]")

pytestmark = pytest.mark.skipif(
    shutil.which("lowdown") is None, reason="lowdown is not installed (make packages)"
)


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, ROOT / "tools" / "manuals", made], check=True)
    return made


def test_every_verb_has_a_page(share: Path) -> None:
    pages = {path.name for path in share.glob("man/man1/*")}
    assert {f"sealanectl-{noun}.1" for noun in (*NOUNS, *COMMANDS, "status")} <= pages
    assert {"sealanectl-volume-create.1", "sealanectl-session-plan.1", "sealane-lab-up.1"} <= pages
    assert (share / "man/man8/sealaned.8").exists()
    # Also for verbs whose arguments are added when they are used.
    text = MACROS.sub("", (share / "man/man1/sealanectl-session-drain.1").read_text())
    assert "sealanectl\\-session\\-drain \\- " in text
    assert "\\-\\-socket PATH" in text
    assert "\\-\\-once" in (share / "man/man1/sealanectl-top.1").read_text()


def test_every_key_of_the_configuration_is_in_its_page(share: Path) -> None:
    text = (share / "man/man5/sealaned.toml.5").read_text().replace("\\-", "-")
    keys = re.findall(r"^\| `([\w.]+)`[^|]* \|", PAGE.read_text(), re.MULTILINE)
    assert len(keys) > 100
    assert not [key for key in keys if f"\\f[CR]{key}\\fR" not in text and key not in text]
    assert "T&" not in text  # no table
    assert "First start" not in text


def completed(share: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    script = f"""
    . '{share}/bash-completion/completions/{words[0]}'
    COMP_WORDS=({" ".join(map(repr, words))})
    COMP_CWORD={len(words) - 1}
    $(complete -p {words[0]} | sed 's/.*-F \\([^ ]*\\).*/\\1/') {words[0]} {words[-1]!r}
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return ended.stdout.split()


def test_bash_completes_nouns_verbs_options_and_choices(share: Path) -> None:
    assert completed(share, "sealanectl", "vol") == ["volume"]
    assert "attach" in completed(share, "sealanectl", "volume", "")
    assert "--display-name" in completed(share, "sealanectl", "volume", "create", "--d")
    assert {"table", "json"} <= {*completed(share, "sealanectl", "volume", "list", "--output", "")}
    assert "--set-up" in completed(share, "sealaned", "--s")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_completions(share: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (make packages)")
    for program in ("sealanectl", "sealaned", "sealane"):
        name = f"_{program}" if shell == "zsh" else f"{program}.fish"
        (path,) = share.glob(f"{shell}/*/{name}")
        subprocess.run([shell, "-n", path], check=True)
