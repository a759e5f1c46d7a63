import asyncio
import errno
from pathlib import Path

import pytest

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.evidence.media_types import SNP_CERTIFICATES
from sealane.daemon.node.evidence.tsm import ReportTree, TsmDriver
from sealane.errors import UnavailableError, UsageError
from vendors.tsm import ImitationTree

RUNTIME_DATA = RuntimeData(
    nonce=bytes(32),
    audience="spiffe://sealane/broker/b",
    node="n",
    role="gateway",
    incarnation=bytes(16),
    tls_public_key=b"tls",
    kem_public_key=bytes(32),
    verifier_key_sha256=bytes(32),
    evidence_type="snp",
)


def collect(driver: TsmDriver) -> bytes:
    return asyncio.run(driver.collect(RUNTIME_DATA, activation=b""))


def test_snp_report_is_over_the_runtime_data(tmp_path: Path) -> None:
    tree = ImitationTree(tmp_path, "sev_guest")
    driver = TsmDriver(tree)
    assert driver.evidence_type == "snp"
    assert collect(driver) == b"signed:" + RUNTIME_DATA.binding().report_data
    assert list(tmp_path.iterdir()) == []


def test_snp_certificates_come_from_a_report_over_nothing_of_use(tmp_path: Path) -> None:
    tree = ImitationTree(tmp_path, "sev_guest")
    driver = TsmDriver(tree)
    for _ in range(2):
        assert asyncio.run(driver.endorsements()) == Item(SNP_CERTIFICATES, b"certificates")
    assert len(set(tree.signed)) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [4, 5])
def test_tdx_quote_is_over_the_runtime_data(tmp_path: Path, version: int) -> None:
    header = version.to_bytes(2, "little")
    tree = ImitationTree(tmp_path, "tdx_guest", sign=lambda data: header + b"signed:" + data)
    driver = TsmDriver(tree)
    assert driver.evidence_type == "tdx"
    assert collect(driver) == header + b"signed:" + RUNTIME_DATA.binding().report_data
    assert asyncio.run(driver.endorsements()) is None


def test_tdx_quote_in_a_token_is_refused(tmp_path: Path) -> None:
    driver = TsmDriver(ImitationTree(tmp_path, "tdx_guest", sign=lambda data: b"\xd2\x84" + data))
    with pytest.raises(UnavailableError, match=r"evidence\.tsm\.quote"):
        collect(driver)


def test_report_that_somebody_else_wrote_to_is_made_again(tmp_path: Path) -> None:
    tree = ImitationTree(tmp_path, "sev_guest")
    driver = TsmDriver(tree)
    tree.strangers = 3
    assert collect(driver) == b"signed:" + RUNTIME_DATA.binding().report_data
    tree.strangers = 4
    with pytest.raises(UnavailableError, match=r"evidence\.tsm\.raced"):
        collect(driver)
    assert list(tmp_path.iterdir()) == []


def test_hardware_that_changes_under_us_is_refused(tmp_path: Path) -> None:
    tree = ImitationTree(tmp_path, "sev_guest")
    driver = TsmDriver(tree)
    tree.provider = "tdx_guest"
    with pytest.raises(UnavailableError, match=r"evidence\.tsm\.raced"):
        collect(driver)


def test_unknown_hardware_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="arm_cca_guest"):
        TsmDriver(ImitationTree(tmp_path, "arm_cca_guest"))


def test_machine_without_confidential_hardware_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"evidence\.tsm\.failed"):
        TsmDriver(ReportTree(tmp_path / "nowhere"))


@pytest.mark.parametrize(("name", "size"), [("outblob", 32 << 10), ("auxblob", 64 << 10)])
def test_report_of_any_size_is_not_read(tmp_path: Path, name: str, size: int) -> None:
    tree = ImitationTree(tmp_path, "sev_guest")
    driver = TsmDriver(tree)
    write = tree.write

    def write_much(path: Path, content: bytes) -> None:
        write(path, content)
        (path.parent / name).write_bytes(bytes(size + 1))

    tree.write = write_much  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match=f"more than {size} bytes"):
        collect(driver)
    assert list(tmp_path.iterdir()) == []


def test_failure_of_the_hardware_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    tree = ImitationTree(tmp_path, "sev_guest")
    driver = TsmDriver(tree)

    def busy(path: Path, content: bytes) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    tree.write = busy  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="busy"):
        collect(driver)
    assert list(tmp_path.iterdir()) == []
