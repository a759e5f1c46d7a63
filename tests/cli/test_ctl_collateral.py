"""`sealanectl collateral list` with a synthetic Intel and AMD."""

import json
from pathlib import Path

import pytest

from sealane.cli import collateral as ctl_collateral
from sealane.cli import ctl
from sealane.crypto.evidence.collateral import VendorRoots, vendor_roots
from vendors.amd import amd
from vendors.intel import intel

AT = "2026-11-21T12:00:00Z"


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> VendorRoots:
    made = VendorRoots(
        amd={"Genoa": amd("Genoa").ark.certificate},
        intel=intel().root.certificate,
        nvidia=vendor_roots().nvidia,
    )
    monkeypatch.setattr(ctl_collateral, "vendor_roots", lambda: made)
    return made


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "intel.json").write_bytes(intel().collateral(number=4))
    (folder / "amd.pem").write_bytes(amd("Genoa").vcek.pem + amd("Genoa").ask.pem)
    return folder


def rows(captured: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return json.loads(captured.readouterr().out)


def test_everything_that_holds_is_shown(
    roots: VendorRoots, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["--output", "json", "collateral", "list", str(files), "--at", AT]) == 0
    shown = rows(capsys)
    assert sorted(row["what"] for row in shown) == [
        *("VCEK", "document", "document", "revocation list", "revocation list", "signer")
    ]
    (key,) = (row for row in shown if row["what"] == "VCEK")
    assert key["of"] == f"Genoa {amd('Genoa').chip_id.hex()}"
    assert key["version"] == "bootloader 4, tee 2, snp 23, microcode 200"
    assert not any(row["why"] for row in shown)


def test_what_is_refused_is_shown_and_told(
    roots: VendorRoots, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "nonsense").write_bytes(b"x")
    assert ctl.main(["--output", "json", "collateral", "list", str(files), "--at", AT]) == 3
    (row,) = (row for row in rows(capsys) if row["what"] == "refused")
    assert (row["of"], row["version"]) == ("nonsense", "attestation.collateral.certificate")


def test_time_is_a_parameter(
    roots: VendorRoots, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = ["--at", "2027-11-22T12:00:00Z"]
    assert ctl.main(["--output", "json", "collateral", "list", str(files), *later]) == 3
    assert {row["what"] for row in rows(capsys)} == {"refused"}


@pytest.mark.parametrize("time", ["yesterday", "2026-11-21T12:00:00"])
def test_a_time_has_a_form_and_a_zone(
    files: Path, time: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ctl.main(["collateral", "list", str(files), "--at", time])
    assert ended.value.code == 2


def test_a_directory_that_isnt_there_is_a_usage_error(tmp_path: Path) -> None:
    assert ctl.main(["collateral", "list", str(tmp_path / "missing")]) == 2
