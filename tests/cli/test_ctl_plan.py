import json
import sys
from pathlib import Path

import pytest

from sealane.cli import ctl

COMMON = ["--size", "8MiB", "--rtt", "25ms", "--rate", "400G", "--mtu", "4179"]


def run(*arguments: str, form: str = "table") -> int:
    return ctl.main(["--output", form, "session", "plan", *COMMON, *arguments])


def test_table_says_which_scheme_wins_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--loss", "1e-3") == 0

    printed = capsys.readouterr().out
    winner = next(line for line in printed.splitlines() if line.startswith("*"))
    assert "(128, 2)" in winner
    assert "2 lost units expected" in printed
    assert "times as fast as selective repeat" in printed
    assert "selective repeat (RTO)" in printed
    assert "up to" in printed


def test_json_has_the_models_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--loss", "1e-3", "--objective", "p999", form="json") == 0

    found = json.loads(capsys.readouterr().out)
    repeat = next(c for c in found["candidates"] if c["scheme"] == "selective repeat")
    # 1.86 × ideal, as in the model's golden table, apart from packet headers.
    assert repeat["mean_seconds"] / found["ideal_seconds"] == pytest.approx(1.86, rel=0.02)
    assert found["candidates"][0]["p999_seconds"] < 1.1 * found["ideal_seconds"]
    assert found["plan"][-1]["length_max"] == 64 << 30


@pytest.mark.slow
def test_bursts_bring_interleaving(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--loss", "1e-2", "--burst", "8") == 0

    assert "depth" in capsys.readouterr().out


def test_plot_draws_the_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.cli.plan_map.LOSSES", (1e-4, 1e-3))
    file = tmp_path / "map.png"

    assert run("--loss", "1e-3", "--plot", str(file)) == 0

    assert file.read_bytes().startswith(b"\x89PNG")
    assert str(file) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--loss", "1"], "--loss"),
        (["--loss", "nan"], "--loss"),
        (["--loss", "some"], "--loss"),
        (["--loss", "0.1", "--rtt", "25"], "--rtt"),
        (["--loss", "0.1", "--rtt", "-1ms"], "--rtt"),
        (["--loss", "0.1", "--rtt", "3601s"], "--rtt"),
        (["--loss", "0.1", "--mtu", "300"], "--mtu"),
        (["--loss", "0.1", "--mtu", "65536"], "--mtu"),
        (["--loss", "0.1", "--rate", "0"], "--rate"),
        (["--loss", "0.1", "--rate", "fast"], "--rate"),
        (["--loss", "0.1", "--size", "0"], "--size"),
        (["--loss", "0.1", "--size", "1TiB"], "--size"),
        (["--loss", "0.1", "--size", "4 KB"], "--size"),
        (["--loss", "0.1", "--parity-budget", "2"], "--parity-budget"),
        (["--loss", "0.1", "--objective", "best"], "--objective"),
    ],
)
def test_bad_values_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)

    assert ended.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--burst", "0.5"], ["--burst", "inf"]])
def test_impossible_paths_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--loss", "0.1", *arguments) == 2

    assert "sealanectl: " in capsys.readouterr().err


def test_a_plot_without_its_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--loss", "1e-3", "--plot", str(tmp_path / "map.png")) == 2
    assert "pip install 'sealane[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "map.png").exists()
