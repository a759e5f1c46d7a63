"""The key encryption key in a token: each test initialises SoftHSM from scratch."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from brokers import Count, rewrapping_of, start_broker
from sealane.crypto.keys import WRAP_NONCE_BYTES, WrappingKey
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.config import HsmConfig
from sealane.errors import UnavailableError, UsageError, VerificationError

pkcs11 = pytest.importorskip("pkcs11")

from sealane.cli.ctl import main as sealanectl  # noqa: E402
from sealane.daemon.broker.hsm import HsmKey  # noqa: E402 - needs the optional dependency

UTILITY = shutil.which("softhsm2-util")
MODULE = "/usr/lib/softhsm/libsofthsm2.so"
PIN = "5678"

pytestmark = pytest.mark.skipif(
    UTILITY is None or not Path(MODULE).exists(), reason="softhsm2 is not installed: make packages"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # SoftHSM reads its configuration once per process.
    directory = tmp_path_factory.mktemp("softhsm")
    (directory / "tokens").mkdir()
    configuration = directory / "softhsm2.conf"
    configuration.write_text(
        f"directories.tokendir = {directory / 'tokens'}\nobjectstore.backend = file\n"
    )
    os.environ["SOFTHSM2_CONF"] = str(configuration)
    return directory


@pytest.fixture
def place(tokens: Path, tmp_path: Path) -> HsmConfig:
    token = tmp_path.name[-32:]
    assert UTILITY is not None
    subprocess.run(
        [UTILITY, "--init-token", "--free", "--label", token, "--so-pin", "1234", "--pin", PIN],
        check=True,
        capture_output=True,
    )
    if pkcs11.lib(MODULE) is not None:
        # The list of slots is read when the library is loaded.
        pkcs11.lib(MODULE).reinitialize()
    pin_file = tmp_path / "pin"
    pin_file.touch(mode=0o600)
    pin_file.write_text(f"{PIN}\n")
    return HsmConfig(module=MODULE, token=token, label="kek", pin_file=str(pin_file))


def test_wraps_and_opens_after_a_new_login(place: HsmConfig) -> None:
    first = HsmKey.create(place)
    wrapped = first.wrap(b"k" * 32, purpose="tenant key", owner="t")
    assert b"k" * 8 not in wrapped
    first.close()
    again = HsmKey(place)
    assert again.unwrap(wrapped, purpose="tenant key", owner="t") == b"k" * 32
    again.close()


@pytest.mark.parametrize(
    ("purpose", "owner"), [("broker key", "t"), ("tenant key", "u"), ("tenant key", "")]
)
def test_a_wrapped_key_opens_for_nothing_else(place: HsmConfig, purpose: str, owner: str) -> None:
    key = HsmKey.create(place)
    wrapped = key.wrap(b"k" * 32, purpose="tenant key", owner="t")
    with pytest.raises(VerificationError) as caught:
        key.unwrap(wrapped, purpose=purpose, owner=owner)
    assert caught.value.reason == "key.wrap.invalid"
    assert key.unwrap(wrapped, purpose="tenant key", owner="t") == b"k" * 32


def test_changed_and_cut_wrapped_keys_are_refused(place: HsmConfig) -> None:
    key = HsmKey.create(place)
    wrapped = key.wrap(b"k" * 32, purpose="p", owner="o")
    for changed in (
        bytes([wrapped[0] ^ 1]) + wrapped[1:],
        wrapped[:-1] + bytes([wrapped[-1] ^ 1]),
        wrapped[: WRAP_NONCE_BYTES + 15],
        wrapped[:-1],
        b"",
    ):
        with pytest.raises(VerificationError):
            key.unwrap(changed, purpose="p", owner="o")


def test_a_key_is_made_once_and_must_be_there(place: HsmConfig) -> None:
    with pytest.raises(UsageError) as caught:
        HsmKey(place)
    assert caught.value.reason == "hsm.key.not_found"
    HsmKey.create(place).close()
    with pytest.raises(UsageError) as caught:
        HsmKey.create(place)
    assert caught.value.reason == "hsm.key.exists"


def test_a_key_that_could_leave_the_token_is_refused(place: HsmConfig) -> None:
    token = pkcs11.lib(MODULE).get_token(token_label=place.token)
    with token.open(user_pin=PIN, rw=True) as session:
        session.generate_key(
            pkcs11.KeyType.AES,
            256,
            label=place.label,
            store=True,
            template={pkcs11.Attribute.SENSITIVE: True, pkcs11.Attribute.EXTRACTABLE: True},
        )
    with pytest.raises(VerificationError) as caught:
        HsmKey(place)
    assert caught.value.reason == "hsm.key.extractable"


def test_wrong_pin_token_and_library_are_one_line(place: HsmConfig, tmp_path: Path) -> None:
    HsmKey.create(place).close()
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("0000")
    for change, reason, family in (
        ({"pin_file": str(wrong)}, "hsm.pin", UsageError),
        ({"token": "nobody"}, "hsm.token", UnavailableError),
        ({"module": "/usr/lib/none.so"}, "hsm.failed", UnavailableError),
    ):
        with pytest.raises(family) as caught:
            HsmKey(place.model_copy(update=change))
        assert caught.value.reason == reason
        assert "\n" not in str(caught.value)
        assert PIN not in str(caught.value)


def test_sealanectl_makes_the_key(place: HsmConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--module", MODULE, "--token", place.token, "--label", "made"]
    assert sealanectl(["key", "hsm", *arguments, "--pin-file", place.pin_file]) == 0
    assert "made" in capsys.readouterr().out
    HsmKey(place.model_copy(update={"label": "made"})).close()


async def test_a_store_moves_from_a_file_into_a_token_and_on_to_its_next_key(
    place: HsmConfig, tmp_path: Path
) -> None:
    path = tmp_path / "b.sqlite"
    following = place.model_copy(update={"label": "kek2"})
    HsmKey.create(place).close()
    HsmKey.create(following).close()
    _, _, registry = await start_broker(
        SqliteStore(path), starts=Count(), heads=Count(), kek=bytes(32)
    )
    before = await registry.tenant_key("t", 0)
    await registry.close()
    for keys in (
        [WrappingKey(bytes(32)), HsmKey(place)],
        [HsmKey(place), HsmKey(following)],
    ):
        registry = await Registry.open(SqliteStore(path), *keys, node="b")
        rotation = rewrapping_of(registry)
        await rotation.announce()
        await rotation.begin()
        await rotation.proceed()
        assert await registry.tenant_key("t", 0) == before
        registry.keys.close()
        await registry.close()
    registry = await Registry.open(SqliteStore(path), HsmKey(following), node="b")
    assert await registry.tenant_key("t", 0) == before
    registry.keys.close()
    await registry.close()


def test_keys_of_one_token_are_used_side_by_side(place: HsmConfig) -> None:
    """A reload opens a key that is open already; closing one must not take the other's login."""
    following = place.model_copy(update={"label": "kek2"})
    HsmKey.create(place).close()
    HsmKey.create(following).close()
    first, second = HsmKey(place), HsmKey(following)
    again = HsmKey(place)
    assert again.key_id == first.key_id != second.key_id
    wrapped = first.wrap(b"k" * 32, purpose="p", owner="o")
    assert again.unwrap(wrapped, purpose="p", owner="o") == b"k" * 32
    again.close()
    assert first.unwrap(wrapped, purpose="p", owner="o") == b"k" * 32
    with pytest.raises(VerificationError):
        second.unwrap(wrapped, purpose="p", owner="o")
    first.close()
    second.close()
