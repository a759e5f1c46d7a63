"""Secrets that a configuration names as the service manager's credentials."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sealane.daemon.runtime import credentials
from sealane.daemon.runtime.credentials import credential_path
from sealane.daemon.runtime.directories import as_daemon
from sealane.daemon.runtime.files import read_file, read_secret
from sealane.errors import UsageError

NOBODY = 65534


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    made = [tmp_path / name for name in ("first", "second")]
    for store in made:
        store.mkdir()
    monkeypatch.setattr(credentials, "STORES", tuple(map(str, made)))
    monkeypatch.setattr(credentials, "OWN_STORE", str(made[0]))
    monkeypatch.setattr(credentials, "ENCRYPTED_STORES", (str(tmp_path / "encrypted"),))
    return made


def test_in_the_unit_a_credential_is_what_the_daemon_was_given(
    stores: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (stores[0] / "a.kek").write_text("another")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "given"))
    assert credential_path("a.kek") == f"{tmp_path}/given/a.kek"


def test_by_hand_it_is_what_the_unit_would_be_given(stores: list[Path]) -> None:
    first, second = (f"{store}/a.kek" for store in stores)
    assert credential_path("a.kek") == first
    Path(second).touch()
    assert credential_path("a.kek") == second
    Path(first).touch()
    assert credential_path("a.kek") == first


def test_an_encrypted_one_is_known_and_only_the_unit_reads_it(
    stores: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "encrypted").mkdir()
    (tmp_path / "encrypted" / "a.kek").touch(mode=0o600)
    assert credential_path("a.kek") == f"{tmp_path}/encrypted/a.kek"
    with pytest.raises(UsageError, match=r"key\.encrypted"):
        read_secret(credential_path("a.kek"), key="x.y")
    (stores[1] / "a.kek").touch()
    assert credential_path("a.kek") == f"{stores[1]}/a.kek"


@pytest.mark.parametrize("name", ["", "../etc/shadow", "a/b", ".hidden", "a" * 128, "a\0"])
def test_names_that_are_paths_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="an absolute path, or credential:NAME"):
        credential_path(name)


def test_a_credential_that_the_unit_lacks_is_told_with_where_it_belongs(
    stores: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        read_secret(credential_path("a.kek"), key="x.y")
    assert str(caught.value) == (
        "x.y: the unit has no credential a.kek; it comes from /etc/credstore/a.kek, if the unit "
        "has the line LoadCredential=a.kek [config.unreadable]"
    )


@pytest.fixture
def acting(tmp_path: Path) -> Callable[[], object]:
    """Return what makes root act as the owner of a daemon's directory."""
    if os.geteuid() != 0:
        pytest.skip("only root acts as others")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, NOBODY, NOBODY)
    for each in (tmp_path, *tmp_path.parents):
        if each.owner() == "root" and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o011)
    return lambda: as_daemon(state)


def test_a_check_by_root_reads_as_the_daemons_user(
    acting: Callable[[], object], tmp_path: Path
) -> None:
    mine = tmp_path / "policy.toml"
    mine.touch(mode=0o600)
    before = (os.geteuid(), os.getegid(), os.getgroups())
    with acting():  # type: ignore[attr-defined]
        assert (os.geteuid(), os.getegid()) == (NOBODY, NOBODY)
        with pytest.raises(UsageError, match="Permission denied"):
            read_file(str(mine), key="broker.policy_file")
    assert (os.geteuid(), os.getegid(), os.getgroups()) == before
    with as_daemon(tmp_path / "none"):
        assert os.geteuid() == 0


def test_it_reads_credentials_as_the_service_manager_does(
    acting: Callable[[], object], stores: list[Path], tmp_path: Path
) -> None:
    stores[0].chmod(0o700)
    kept = stores[0] / "a.kek"
    kept.write_bytes(b"secret")
    kept.chmod(0o600)
    elsewhere = tmp_path / "b.kek"
    elsewhere.touch(mode=0o600)
    with acting():  # type: ignore[attr-defined]
        assert read_secret(str(kept), key="a.b") == b"secret"
        assert os.geteuid() == NOBODY
        with pytest.raises(UsageError, match="Permission denied"):
            read_secret(str(elsewhere), key="a.b")
    kept.chmod(0o644)
    with acting(), pytest.raises(UsageError, match=r"key\.file\.mode"):  # type: ignore[attr-defined]
        read_secret(str(kept), key="a.b")
