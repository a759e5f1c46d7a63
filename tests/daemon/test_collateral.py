"""The directory of collateral: loaded, reloaded, and never older than what was in use."""

import dataclasses
import datetime as dt
import signal
from pathlib import Path

import pytest

from control_plane import Site, daemon, short_directory, wait_for_log
from sealane.crypto.evidence.collateral import VendorRoots, vendor_roots
from sealane.daemon.broker import collateral
from sealane.daemon.broker.collateral import CollateralKeeper
from sealane.daemon.metrics import Metrics
from sealane.errors import UnavailableError, UsageError, VerificationError
from vendors.authority import NOW
from vendors.intel import FMSPC, NEXT_UPDATE, Intel, intel


@pytest.fixture(scope="module")
def vendor() -> Intel:
    return intel()


def keeper(vendor: Intel, path: Path) -> CollateralKeeper:
    others = vendor_roots()
    roots = VendorRoots(amd=others.amd, intel=vendor.root.certificate, nvidia=others.nvidia)
    (path / "files").mkdir(exist_ok=True)
    metrics = Metrics()
    return CollateralKeeper(path / "files", marks=path / "marks.json", metrics=metrics, roots=roots)


def test_what_lies_in_the_directory_is_used(vendor: Intel, tmp_path: Path) -> None:
    kept = keeper(vendor, tmp_path)
    assert not kept.current().tcb_infos
    (tmp_path / "files" / "bundle.json").write_bytes(vendor.collateral())
    (tmp_path / "files" / "nonsense").write_bytes(b"x")
    (tmp_path / "files" / ".draft").write_bytes(b"x")
    (tmp_path / "files" / "folder").mkdir()
    kept.load(now=NOW)
    assert set(kept.current().tcb_infos) == {FMSPC}


def test_metrics_tell_what_ends_first(vendor: Intel, tmp_path: Path) -> None:
    metrics = Metrics()
    roots = dataclasses.replace(vendor_roots(), intel=vendor.root.certificate)
    kept = CollateralKeeper(tmp_path, marks=tmp_path / ".marks", metrics=metrics, roots=roots)

    def values() -> list[float | None]:
        names = ("refusals", "next_update_timestamp_seconds")
        return [metrics.registry.get_sample_value(f"sealane_broker_collateral_{n}") for n in names]

    kept.load(now=NOW)
    assert values() == [0, 0]
    (tmp_path / "bundle.json").write_bytes(vendor.collateral())
    (tmp_path / "nonsense").write_bytes(b"x")
    kept.load(now=NOW)
    assert values() == [1, NEXT_UPDATE.timestamp()]
    soon = NOW + dt.timedelta(hours=1)
    (tmp_path / "bundle.json").write_bytes(vendor.collateral(list_end=soon))
    kept.load(now=NOW)
    assert values() == [1, soon.timestamp()]


def test_marks_outlive_the_broker(vendor: Intel, tmp_path: Path) -> None:
    path = tmp_path / "files" / "bundle.json"
    first = keeper(vendor, tmp_path)
    path.write_bytes(vendor.collateral(number=5))
    first.load(now=NOW)
    path.write_bytes(vendor.collateral(number=4))
    for kept in (first, keeper(vendor, tmp_path)):
        kept.load(now=NOW)
        assert not kept.current().revocation_lists
        assert not kept.current().tcb_infos
    path.write_bytes(vendor.collateral(number=5))
    first.load(now=NOW)
    assert first.current().tcb_infos


def test_marks_are_stored_before_what_they_cover_is_used(
    vendor: Intel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeper(vendor, tmp_path)
    (tmp_path / "files" / "bundle.json").write_bytes(vendor.collateral())

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collateral, "write_durably", full)
    with pytest.raises(UnavailableError, match=r"No space.*collateral\.marks\.unwritable"):
        kept.load(now=NOW)
    assert not kept.current().tcb_infos


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": "b"}', b'{"a": true}', b"[" * 9000])
def test_marks_that_cant_be_read_stop_the_load(
    vendor: Intel, tmp_path: Path, content: bytes
) -> None:
    kept = keeper(vendor, tmp_path)
    (tmp_path / "files" / "bundle.json").write_bytes(vendor.collateral())
    (tmp_path / "marks.json").write_bytes(content)
    with pytest.raises(VerificationError, match=r"collateral\.marks\.malformed"):
        kept.load(now=NOW)
    assert not kept.current().tcb_infos


def test_a_directory_that_cant_be_read_is_named(vendor: Intel, tmp_path: Path) -> None:
    kept = keeper(vendor, tmp_path)
    (tmp_path / "files").rmdir()
    with pytest.raises(UsageError, match=r"collateral\.unreadable"):
        kept.load(now=NOW)


def test_files_are_counted(vendor: Intel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collateral, "FILES_MAX", 1)
    kept = keeper(vendor, tmp_path)
    for name in ("a", "b"):
        (tmp_path / "files" / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=r"collateral\.count"):
        kept.load(now=NOW)


def test_without_a_directory_only_the_roots_are_known(tmp_path: Path) -> None:
    kept = CollateralKeeper(None, marks=tmp_path / "marks.json", metrics=Metrics())
    kept.load(now=NOW)
    assert kept.current().roots == vendor_roots()
    assert not (tmp_path / "marks.json").exists()


def test_a_broker_reads_its_collateral_at_start_and_on_sighup() -> None:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({})
        files = root / "collateral"
        files.mkdir()
        (files / "nonsense").write_bytes(b"x")
        path = site.broker_config()
        path.write_text(path.read_text() + f'collateral_dir = "{files}"\n')
        with daemon(path) as running:
            (files / "nonsense").unlink()
            running.process.send_signal(signal.SIGHUP)
            wait_for_log(running.process, path, "reloaded")
            lines = running.log_lines()
    refused = [line for line in lines if line["event"] == "collateral_refused"]
    assert [(line["file"], line["reason"]) for line in refused] == [
        ("nonsense", "attestation.collateral.certificate")
    ]
    loaded = [line for line in lines if line["event"] == "collateral_loaded"]
    assert [(line["files"], line["refused"]) for line in loaded] == [(1, 1), (0, 0)]
